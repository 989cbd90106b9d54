"""What lockstep.toml promises: defaults without a file, clear refusals, and no secret at rest."""

from __future__ import annotations

import json
import pickle
import stat
from pathlib import Path

import pytest

from lockstep.config import Config, absolute_sqlite, load_config, parse_duration, parse_size
from lockstep.errors import Invalid
from lockstep.job import Limits
from lockstep.secrets import expand, protect, redact


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCKSTEP_CONFIG", raising=False)
    return tmp_path


def written(folder: Path, text: str) -> Config:
    (folder / "lockstep.toml").write_text(text)
    return load_config()


def refusal(folder: Path, text: str) -> Invalid:
    with pytest.raises(Invalid) as caught:
        written(folder, text)
    return caught.value


def test_without_a_file_everything_lives_in_the_working_folder(folder: Path) -> None:
    config = load_config()

    assert config.path is None
    assert config.store_url == f"sqlite:///{folder}/.lockstep/jobs.db"
    assert config.catalogs["lake"] == {
        "type": "sql",
        "uri": f"sqlite:///{folder}/.lockstep/catalog.db",
        "warehouse": f"file://{folder}/.lockstep/warehouse",
    }
    assert config.spark == {"master": "local[*]"}
    assert config.limits == Limits()
    assert config.finished_job_ttl_s == 604_800
    assert not (folder / ".lockstep").exists(), "reading a configuration creates nothing"


def test_the_file_of_the_contract_is_read(folder: Path) -> None:
    config = written(
        folder,
        """
        [store]
        url = "sqlite:///.lockstep/jobs.db"
        [spark]
        master = "local[2]"
        [catalogs.lake]
        type = "sql"
        uri = "sqlite:///.lockstep/catalog.db"
        warehouse = ".lockstep/warehouse"
        [storage."s3://bucket"]
        endpoint = "http://localhost:9000"
        [limits]
        task_memory = "512MB"
        lease_s = 30
        task_attempts = 8
        task_deadline_s = 3600
        commit_attempts = 20
        commit_deadline_s = 600
        finished_job_ttl_s = 604800
        """,
    )

    assert config.limits == Limits()
    assert config.spark["master"] == "local[2]"
    assert config.storage == {"s3://bucket": {"endpoint": "http://localhost:9000"}}


def test_paths_are_relative_to_the_folder_of_the_file_not_to_the_working_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = folder / "project"
    elsewhere.mkdir()
    (elsewhere / "lockstep.toml").write_text('[store]\nurl = "sqlite:///jobs.db"\n')
    monkeypatch.setenv("LOCKSTEP_CONFIG", "project/lockstep.toml")

    config = load_config()

    assert config.root == elsewhere
    assert config.store_url == f"sqlite:///{elsewhere}/jobs.db"
    assert config.catalogs["lake"]["warehouse"] == f"file://{elsewhere}/.lockstep/warehouse"


def test_a_named_file_that_is_missing_is_refused(folder: Path) -> None:
    with pytest.raises(Invalid, match=r"nowhere\.toml"):
        load_config(Path("nowhere.toml"))


@pytest.mark.parametrize(
    ("text", "wrong", "right"),
    [
        ("[stores]\n", "stores", '"store"'),
        ('[store]\nuri = "sqlite:///x"\n', "uri", '"url"'),
        ("[limits]\ntask_memroy = 1\n", "task_memroy", '"task_memory"'),
        ("[limits]\nlease = 1\n", "lease", '"lease_s"'),
        ('[spark]\nmastre = "local"\n', "mastre", '"master"'),
        ('[spark]\n"executor.memory" = "1g"\n', "executor.memory", '"spark.executor.memory"'),
        ('[clickhouse]\npin_db = "x"\n', "pin_db", '"pin_database"'),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(
    folder: Path, text: str, wrong: str, right: str
) -> None:
    error = refusal(folder, text)

    assert f'"{wrong}"' in error.message
    assert right in (error.hint or "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[limits\n", "not valid TOML"),
        ('limits = "x"\n', "must be a table"),
        ("[limits]\ntask_attempts = 0\n", "at least 1"),
        ("[limits]\ntask_attempts = true\n", "at least 1"),
        ('[limits]\ntask_memory = "much"\n', "not a size"),
        ("[limits]\nlease_s = -1\n", "not a duration"),
        ('[catalogs]\nlake = "sql"\n', "must be a table"),
        ("[storage.bucket]\nx = 1\n", "storage address"),
        ('[store]\nurl = "jobs.db"\n', "not an address"),
        ("[catalogs.x]\nuri = ['a']\n", "must be text"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(folder: Path, text: str, said: str) -> None:
    assert said in refusal(folder, text).message


def test_dotted_keys_reach_spark_and_pyiceberg_with_their_dots(folder: Path) -> None:
    config = written(
        folder,
        """
        [spark]
        spark.executor.memory = "2g"
        spark.ui.enabled = false
        [catalogs.prod]
        type = "rest"
        uri = "http://catalog:8181"
        warehouse = "analytics"
        s3.endpoint = "http://minio:9000"
        s3.path-style-access = true
        """,
    )

    assert config.spark["spark.executor.memory"] == "2g"
    assert config.spark["spark.ui.enabled"] == "false"
    assert config.catalogs["prod"] == {
        "type": "rest",
        "uri": "http://catalog:8181",
        "warehouse": "analytics",
        "s3.endpoint": "http://minio:9000",
        "s3.path-style-access": "true",
    }
    assert "lake" in config.catalogs


def test_variables_are_filled_in_when_the_file_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAKE_TOKEN", "s3cret")
    text = '[catalogs.prod]\ntype = "rest"\ntoken = "${LAKE_TOKEN}"\n'

    config = written(folder, text)

    assert config.catalogs["prod"]["token"] == "s3cret"
    assert "s3cret" not in repr(config)
    monkeypatch.delenv("LAKE_TOKEN")
    assert "LAKE_TOKEN" in refusal(folder, text).message


def test_a_configuration_travels_to_another_process() -> None:
    config = load_config()

    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("url", "absolute"),
    [
        ("sqlite:///a/b.db", "sqlite:////srv/a/b.db"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
        ("sqlite+pysqlite:///b.db?timeout=3", "sqlite+pysqlite:////srv/b.db?timeout=3"),
        ("sqlite:///:memory:", "sqlite:///:memory:"),
        ("sqlite://", "sqlite://"),
        ("postgresql://host/db", "postgresql://host/db"),
    ],
)
def test_only_the_files_of_sqlite_are_made_absolute(url: str, absolute: str) -> None:
    assert absolute_sqlite(url, Path("/srv")) == absolute


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MB", 512_000_000),
        ("256MiB", 2**28),
        ("1.5 GB", 1_500_000_000),
        ("7000", 7000),
        (9000, 9000),
        ("3kb", 3000),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text, "--file-size") == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("6h", 21_600),
        ("1h30m", 5400),
        ("90", 90),
        (2.5, 2.5),
        ("2d", 172_800),
        ("500ms", 0.5),
        ("10 min", 600),
    ],
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text, "--deadline") == seconds


@pytest.mark.parametrize("text", ["", "h", "6x", "6h!", "-6h", "0", True, None])
def test_what_is_no_duration_is_refused_by_name(text: object) -> None:
    with pytest.raises(Invalid, match="--deadline"):
        parse_duration(text, "--deadline")


@pytest.mark.parametrize("text", ["", "MB", "6XB", "-1MB", "0", True, None])
def test_what_is_no_size_is_refused_by_name(text: object) -> None:
    with pytest.raises(Invalid, match="--file-size"):
        parse_size(text, "--file-size")


@pytest.mark.parametrize(
    ("value", "meant"), [("5", "5MB"), (512, "512MB"), ("999 B", "999MB"), ("0.2kb", "0.2MB")]
)
def test_a_size_that_nobody_means_is_refused_with_the_unit_that_is_probably_missing(
    value: object, meant: str
) -> None:
    with pytest.raises(Invalid, match=r"--file-size .* bytes; the least is 1KB") as refused:
        parse_size(value, "--file-size")
    assert refused.value.hint == f'did you mean "{meant}"?'


def test_a_task_memory_without_its_unit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lockstep.toml").write_text('[limits]\ntask_memory = "512"\n')
    with pytest.raises(Invalid, match=r'limits.task_memory "512" is 512 bytes') as refused:
        load_config(tmp_path / "lockstep.toml")
    assert refused.value.hint == 'did you mean "512MB"?'


@pytest.mark.parametrize(
    ("address", "printed"),
    [
        ("clickhouse://me:secret@host:8123/db/t", "clickhouse://me:***@host:8123/db/t"),
        ("clickhouse://me:${PW}@host/db/t", "clickhouse://me:${PW}@host/db/t"),
        ("clickhouse://me:a${PW}@host/db/t", "clickhouse://me:***@host/db/t"),
        ("clickhouse://me:p@ss@host/db/t", "clickhouse://me:***@host/db/t"),
        ("clickhouse://me:p/ss@host/db/t", "clickhouse://me:***@host/db/t"),
        ("clickhouse://me@host/db/t", "clickhouse://me@host/db/t"),
        ("clickhouse://host:8123/db/t@x", "clickhouse://host:8123/db/t@x"),
        ("clickhouse://host/db/t?password=abc&x=1", "clickhouse://host/db/t?password=***&x=1"),
        ("postgresql://u:secret@h/db", "postgresql://u:***@h/db"),
        ("chdb:data/db/t", "chdb:data/db/t"),
        ("iceberg://lake/ns.table@12", "iceberg://lake/ns.table@12"),
    ],
)
def test_no_printed_address_holds_a_secret(address: str, printed: str) -> None:
    assert redact(address) == printed


def test_a_literal_password_is_kept_apart_from_the_address(folder: Path) -> None:
    config = load_config()
    address = "clickhouse://me:s%40cret@host:8123/db/t"

    stored = protect(address, config)

    assert "cret" not in stored
    assert stored.startswith("clickhouse://me:${LOCKSTEP_SECRET_")
    assert protect(stored, config) == stored, "protecting twice changes nothing"
    assert expand(stored, config) == address
    kept = folder / ".lockstep" / "secrets.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert list(json.loads(kept.read_text()).values()) == ["s@cret"]


def test_a_kept_password_that_is_elsewhere_says_which_variable_to_set(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = protect("clickhouse://me:secret@host/db/t", load_config())
    name = stored.split("${")[1].split("}")[0]
    (folder / ".lockstep" / "secrets.json").unlink()

    with pytest.raises(Invalid, match=name) as caught:
        expand(stored, load_config())
    assert name in (caught.value.hint or "")

    monkeypatch.setenv(name, "other")
    assert expand(stored, load_config()) == "clickhouse://me:other@host/db/t"


def test_two_addresses_keep_two_passwords() -> None:
    config = load_config()
    addresses = ["clickhouse://me:one@a/db/t", "clickhouse://me:two@b/db/t", "clickhouse://you:three@a/db/t"]

    stored = [protect(address, config) for address in addresses]

    assert [expand(address, config) for address in stored] == addresses


def test_a_password_that_the_address_would_cut_is_refused(folder: Path) -> None:
    with pytest.raises(Invalid, match="ends it early"):
        protect("clickhouse://me:p/ss@host/db/t", load_config())
    assert not (folder / ".lockstep").exists()


def test_a_variable_may_hold_any_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PW", "p@s/s:w#?%")
    monkeypatch.setenv("TABLE", "events/x")

    assert expand("clickhouse://me:${PW}@host/db/${TABLE}") == (
        "clickhouse://me:p%40s%2Fs%3Aw%23%3F%25@host/db/events/x"
    )


def test_an_address_without_a_secret_writes_nothing(folder: Path) -> None:
    for address in (
        "clickhouse://host/db/t",
        "chdb:x/db/t",
        "iceberg://lake/a.b",
        "clickhouse://u:${X}@h/d/t",
    ):
        assert protect(address, load_config()) == address
    assert not (folder / ".lockstep").exists()


def test_an_unset_variable_is_named() -> None:
    with pytest.raises(Invalid, match="NOBODY_SET_THIS"):
        expand("chdb:${NOBODY_SET_THIS}/db/t")
