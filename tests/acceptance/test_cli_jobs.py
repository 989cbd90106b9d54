"""The commands that look at jobs and change them, as real processes on a store with jobs in it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import load_config
from lockstep.errors import ErrorInfo
from lockstep.job import Event, Holding, Job, Kind, NewJob, Plan, State, TaskSpec
from lockstep.runtime import new_id
from lockstep.store import JobStore, open_store
from tests import players
from tests.zygote import Zygote

LOCKSTEP = str(Path(sys.executable).with_name("lockstep"))


class Shell:
    """A working folder with its store, and the command in it."""

    def __init__(self, folder: Path, zygote: Zygote) -> None:
        self.folder = folder
        self._zygote = zygote
        self.store: JobStore = open_store(load_config(self._touched()).store_url)

    def _touched(self) -> Path:
        path = self.folder / "lockstep.toml"
        path.touch()
        return path

    def run(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return players.run_forked(
            self._zygote,
            players.command,
            *arguments,
            folder=self.folder,
            environment=self._environment(env or {}),
            timeout_s=60,
        )

    def run_anew(self, *arguments: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """In an interpreter that has nothing loaded yet."""
        return subprocess.run(
            [LOCKSTEP, *arguments],
            cwd=self.folder,
            env=self._environment(env),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("LOCKSTEP_")}
        return {**clean, **more}

    def ok(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def document(self, *arguments: str, code: int = 0) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)

    def job(self, partition: str = "202401", tasks: int = 2, source: str = "clickhouse://h/db/events") -> Job:
        plan = Plan(
            kind=Kind.EXPORT,
            source=source,
            target="iceberg://lake/db.events",
            target_uuid="u",
            location="file:///x",
            schema={},
            spec={},
            sort_order={},
            columns=(),
            pin={},
            partition=partition,
            rows=100 * tasks,
        )
        new = NewJob(new_id(), new_id(), plan, Holding(f"s|{partition}", True), [TaskSpec({}, 100)] * tasks)
        return self.store.create([new])[0]

    def failed_job(self, cls: str = "Corrupt") -> Job:
        job = self.job()
        return self.store.stop(job.job_id, Event.FAIL, ErrorInfo(cls, "part p is damaged", "drop it"))

    def state(self, job: Job) -> State:
        return self.store.read(job.job_id).state


@pytest.fixture
def shell(tmp_path: Path, zygote: Zygote) -> Shell:
    return Shell(tmp_path, zygote)


def test_jobs_lists_every_job_newest_first(shell: Shell) -> None:
    first, second = shell.job("202401"), shell.job("202402")

    text = shell.ok("jobs")
    documents = shell.document("jobs")

    assert [document["job_id"] for document in documents] == [second.job_id, first.job_id]
    assert documents[0]["state"] == "pending"
    assert documents[0]["partition"] == "202402"
    assert documents[0]["rows_total"] == 200
    assert first.job_id in text
    assert "\x1b" not in text, "a pipe gets no colours"


def test_jobs_can_be_narrowed_to_a_state(shell: Shell) -> None:
    shell.job("202401")
    paused = shell.store.pause(shell.job("202402").job_id)

    assert [job["job_id"] for job in shell.document("jobs", "--state", "paused")] == [paused.job_id]
    assert shell.document("jobs", "--state", "failed") == []
    assert shell.run("jobs", "--state", "sleeping").returncode == 2


def test_an_empty_store_has_no_jobs_and_says_so(shell: Shell) -> None:
    assert shell.ok("jobs").strip() == "no jobs"
    assert shell.document("jobs") == []


def test_a_job_is_found_by_an_unambiguous_prefix(shell: Shell) -> None:
    job = shell.job()
    assert shell.document("show", job.job_id[:20])["job_id"] == job.job_id


def test_an_ambiguous_prefix_is_refused_and_lists_the_jobs(shell: Shell) -> None:
    jobs = [shell.job("1"), shell.job("2")]
    done = shell.run("show", jobs[0].job_id[:2])
    assert done.returncode == 2
    assert all(job.job_id in done.stderr for job in jobs)


@pytest.mark.parametrize("command", ["show", "watch", "history", "kill", "pause", "resume", "retry"])
def test_no_such_job_is_exit_code_5_for_every_command(shell: Shell, command: str) -> None:
    done = shell.run(command, "ffff", "--json")

    assert done.returncode == 5
    assert json.loads(done.stdout)["error"]["class"] == "NoSuchJob"
    assert "error:" in done.stderr
    assert "Traceback" not in done.stderr


def test_show_says_what_waits_for_what(shell: Shell) -> None:
    job = shell.job()
    claim = shell.store.claim("host/1/x", 1, 30.0)[0]
    begun = shell.store.begin(claim.lease, 30.0)
    shell.store.fail(begun.lease, ErrorInfo("Retryable", "storage is down"), 1000.0)

    text = shell.ok("show", job.job_id)
    document = shell.document("show", job.job_id)

    assert "1 task to be tried again, the next in" in text
    assert "storage is down" in text
    assert document["tasks_waiting_for_retry"] == 1
    assert document["tasks"][0]["error"]["message"] == "storage is down"


def test_history_lists_every_event(shell: Shell) -> None:
    job = shell.job()
    shell.store.pause(job.job_id)

    assert [entry["state"] for entry in shell.document("history", job.job_id)] == ["pending", "paused"]
    assert "paused" in shell.ok("history", job.job_id)


def test_pause_and_resume(shell: Shell) -> None:
    job = shell.job()

    assert shell.document("pause", job.job_id)["state"] == "paused"
    assert shell.document("resume", job.job_id)["state"] == "pending"
    assert shell.state(job) is State.PENDING


def test_an_ended_job_cannot_be_paused(shell: Shell) -> None:
    job = shell.failed_job()
    assert shell.run("pause", job.job_id).returncode == 2
    assert shell.state(job) is State.FAILED


def test_retry_lets_a_failed_job_wait_again_with_a_new_commit_id(shell: Shell) -> None:
    job = shell.failed_job()

    document = shell.document("retry", job.job_id)

    assert document["state"] == "pending"
    assert document["generation"] == 2
    assert document["commit_id"] != job.commit_id


def test_retry_of_a_job_that_has_not_failed_is_refused(shell: Shell) -> None:
    assert shell.run("retry", shell.job().job_id).returncode == 2


def test_kill_takes_several_jobs(shell: Shell) -> None:
    jobs = [shell.job("1"), shell.job("2"), shell.job("3")]

    shell.ok("kill", jobs[0].job_id, jobs[1].job_id)

    assert [shell.state(job) for job in jobs] == [State.KILLED, State.KILLED, State.PENDING]


def test_kill_where_takes_the_live_jobs_of_a_state_only(shell: Shell) -> None:
    waiting, paused = shell.job("1"), shell.store.pause(shell.job("2").job_id)
    failed = shell.failed_job()

    killed = shell.document("kill", "--where", "state=paused,failed")["jobs"]

    assert [job["job_id"] for job in killed] == [paused.job_id]
    assert shell.state(waiting) is State.PENDING
    assert shell.state(failed) is State.FAILED


def test_a_kill_that_names_a_missing_job_kills_none(shell: Shell) -> None:
    job = shell.job()
    assert shell.run("kill", job.job_id, "ffff").returncode == 5
    assert shell.state(job) is State.PENDING


@pytest.mark.parametrize("arguments", [[], ["--where", "colour=red"], ["--where", "state=asleep"]])
def test_a_kill_that_names_nothing_is_refused(shell: Shell, arguments: list[str]) -> None:
    job = shell.job()
    assert shell.run("kill", *arguments).returncode == 2
    assert shell.state(job) is State.PENDING


def test_killing_a_killed_job_again_is_no_error(shell: Shell) -> None:
    job = shell.job()
    shell.ok("kill", job.job_id)
    shell.ok("kill", job.job_id)


def test_watch_ends_with_the_exit_code_of_the_job(shell: Shell) -> None:
    failed = shell.failed_job()
    killed = shell.store.stop(shell.job("2").job_id, Event.KILL)

    done = shell.run("watch", failed.job_id)

    assert done.returncode == 1
    assert "part p is damaged" in done.stdout
    assert shell.document("watch", killed.job_id, code=4)["state"] == "killed"


@pytest.mark.parametrize(("cls", "offered"), [("Corrupt", False), ("Retryable", True), ("OSError", True)])
def test_a_retry_is_offered_only_where_it_can_help(shell: Shell, cls: str, offered: bool) -> None:
    job = shell.failed_job(cls)
    for command in ("watch", "show"):
        assert ("lockstep retry" in shell.run(command, job.job_id).stdout) == offered


def test_a_failpoint_that_does_not_exist_is_refused_by_every_command(shell: Shell) -> None:
    for command in (["jobs"], ["kill", "0"], ["doctor"]):
        done = shell.run(*command, env={"LOCKSTEP_FAILPOINTS": "bogus=kill"})
        assert done.returncode == 2
        assert 'unknown failpoint "bogus"' in done.stderr


def test_a_job_that_has_read_nothing_has_no_fingerprint(shell: Shell) -> None:
    assert shell.document("show", shell.job().job_id)["fingerprint"] is None


def test_a_worker_with_ended_jobs_only_says_that_there_is_nothing_to_work_on(shell: Shell) -> None:
    shell.failed_job()
    done = shell.run("worker", "--once")
    assert done.returncode == 0
    assert "no job to work on; working until none is left" in done.stderr


def test_the_help_shows_no_type_for_a_flag(shell: Shell) -> None:
    for command in ([], ["export"], ["jobs"]):
        assert "bool" not in shell.ok(*command, "--help")


def test_an_unset_variable_of_a_catalog_stops_only_who_needs_it(shell: Shell) -> None:
    job = shell.job()
    (shell.folder / "lockstep.toml").write_text('[catalogs.gone]\ntype = "rest"\nuri = "${NOT_SET}"\n')

    doctor = shell.run("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(doctor.stdout)["checks"]}

    assert job.job_id in shell.ok("jobs")
    assert (
        "catalogs.gone.uri: the environment variable NOT_SET is not set" in checks["catalog gone"]["detail"]
    )
    assert checks["catalog gone"]["verdict"] == "broken"
    assert checks["catalog lake"]["verdict"] == "ok"
    assert checks["failpoints"]["verdict"] == "ok"
    assert doctor.returncode == 1
    for working in (["worker", "--once"], ["export", "chdb:x/db/t", "iceberg://lake/a.b", "--all"]):
        done = shell.run(*working)
        assert done.returncode == 2
        assert "NOT_SET" in done.stderr


def test_doctor_goes_on_where_the_configuration_is_broken(shell: Shell) -> None:
    (shell.folder / "lockstep.toml").write_text("[limits]\nleese_s = 3\n")
    done = shell.run("doctor", "--json")
    checks = {check["name"]: check["verdict"] for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert checks["config"] == "broken"
    assert checks["python"] == "ok"


def test_a_light_command_imports_nothing_heavy(shell: Shell) -> None:
    shell.job()
    heavy = (
        "pyspark",
        "pyarrow",
        "pyiceberg",
        "pandas",
        "numpy",
        "clickhouse_connect",
        "chdb",
        "duckdb",
        "obstore",
    )
    for command in (["jobs"], ["show", "0"], ["kill", "0"], ["sweep", "--help"]):
        done = shell.run_anew(*command, env={"PYTHONPROFILEIMPORTTIME": "1"})
        imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
        assert done.returncode == 0
        assert "lockstep" in imported
        assert imported.isdisjoint(heavy), sorted(imported & set(heavy))


def test_a_sweep_lists_what_it_cannot_look_at_and_deletes_nothing(shell: Shell) -> None:
    job = shell.job(source="parquet:/nowhere")
    document = shell.document("sweep", "--dry-run")
    assert document["garbage"] == []
    assert [thing["what"] for thing in document["kept_unknown"]] == [job.plan.target]
    assert "nothing to delete" in shell.ok("sweep")


@pytest.mark.parametrize("arguments", [["--unknown-older-than", "1h"], ["mysql://h/db"], ["--older", "1d"]])
def test_a_sweep_that_is_not_understood_is_refused(shell: Shell, arguments: list[str]) -> None:
    assert shell.run("sweep", *arguments).returncode == 2


def test_no_command_shows_a_password(shell: Shell) -> None:
    job = shell.job(source="clickhouse://me:topsecret@h/db/events")
    for arguments in (["jobs"], ["jobs", "--json"], ["show", job.job_id], ["show", job.job_id, "--json"]):
        done = shell.run(*arguments)
        assert "topsecret" not in done.stdout + done.stderr
        assert "h/db/events" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["exprot"], 'did you mean "lockstep export"?'),
        (["jobs", "--colour"], "lockstep jobs --help"),
        (["show"], "JOB"),
        (["export", "chdb:x/db/t", "iceberg://lake/a.b"], "--partition"),
        (["export", "chdb:x/db/t", "iceberg://lake/a.b", "--all", "--part", "p"], "exclude each other"),
        (["export", "chdb:x/db/t", "iceberg://lake/a.b", "--all", "--file-size", "big"], "--file-size"),
        (["export", "chdb:x/db/t", "iceberg://lake/a.b", "--all", "--file-size", "5"], "least is 1KB"),
        (["export", "chdb:x/db/t", "iceberg://lake/a.b", "--all", "--deadline", "soon"], "--deadline"),
        (["export", "chdb:x/db/t", "iceberg://lake/a.b", "--all", "--on-existing", "merge"], "on-existing"),
        (["export", "ftp://x", "iceberg://lake/a.b", "--all"], '"ftp:" is not a source'),
        (["export", "chdb:${NOT_SET}/db/t", "iceberg://lake/a.b", "--all"], "NOT_SET"),
        (["export", "chdb:db/t", "iceberg://lake/a.b", "--all"], '"chdb:db/t" is not chdb:PATH/db/table'),
        (["partitions", "chdb:nowhere/db/t"], "nowhere"),
        (["partitions", "clickhouse://127.0.0.1:1/db/t"], "does not answer"),
    ],
)
def test_a_wrong_request_is_exit_code_2_says_why_and_creates_nothing(
    shell: Shell, arguments: list[str], said: str
) -> None:
    done = shell.run(*arguments, "--json")

    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["error"]["message"] in done.stderr
    assert shell.store.list() == []


def test_a_configuration_that_is_wrong_is_exit_code_2(shell: Shell) -> None:
    (shell.folder / "lockstep.toml").write_text("[limits]\nleese_s = 3\n")
    done = shell.run("jobs")
    assert done.returncode == 2
    assert 'did you mean "lease_s"?' in done.stderr


def test_a_configuration_elsewhere_is_read_with_an_option_or_a_variable(shell: Shell, tmp_path: Path) -> None:
    job = shell.job()
    away = tmp_path / "away"
    away.mkdir()
    there = {"cwd": away, "capture_output": True, "text": True, "check": True, "timeout": 60}
    file = str(shell.folder / "lockstep.toml")

    by_option = subprocess.run([LOCKSTEP, "jobs", "--config", file], **there)  # type: ignore[call-overload]
    by_variable = subprocess.run(  # type: ignore[call-overload]
        [LOCKSTEP, "jobs"], env={**os.environ, "LOCKSTEP_CONFIG": file}, **there
    )

    assert job.job_id in by_option.stdout
    assert job.job_id in by_variable.stdout


def test_an_unexpected_error_is_one_line_and_leaves_its_traceback_in_a_file(tmp_path: Path) -> None:
    gone = f"mkdir gone && cd gone && rmdir ../gone && {LOCKSTEP} jobs"  # nobody expects that
    there: dict[str, Any] = {
        "shell": True,
        "cwd": tmp_path,
        "capture_output": True,
        "text": True,
        "timeout": 60,
    }
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    done = subprocess.run(gone, env=environment, check=False, **there)
    shown = subprocess.run(f"{gone} --debug", env=environment, check=False, **there)

    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 2
    assert "Traceback" in (tmp_path / "lockstep-errors.log").read_text()
    assert str(tmp_path / "lockstep-errors.log") in done.stderr
    assert "Traceback" in shown.stderr


def test_a_reader_that_goes_away_is_no_error(shell: Shell) -> None:
    for number in range(30):
        shell.job(str(number))
    done = subprocess.run(
        f"{LOCKSTEP} jobs --json | head -c 10",
        shell=True,
        cwd=shell.folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stderr == ""


def _all_shown(master: int) -> bytes:
    """Everything written to a terminal; its last writer going away reads as an error on Linux."""
    shown = b""
    with contextlib.suppress(OSError):
        while piece := os.read(master, 65536):
            shown += piece
    return shown


def test_a_terminal_gets_colours(shell: Shell) -> None:
    shell.store.pause(shell.job().job_id)
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen([LOCKSTEP, "jobs"], cwd=shell.folder, stdout=slave, env=environment) as process:
        os.close(slave)
        shown = _all_shown(master)
        process.wait(timeout=60)
    os.close(master)
    assert b"\x1b[33mpaused" in shown


def test_doctor_is_content_with_this_machine_and_names_armed_failpoints(shell: Shell) -> None:
    healthy = shell.run("doctor")
    drilled = shell.run("doctor", env={"LOCKSTEP_FAILPOINTS": "commit.after_publish=kill@2"})

    assert healthy.returncode == 0, healthy.stdout
    for name in ("java", "spark", "chdb", "store", "catalog lake", "storage", "failpoints"):
        assert name in healthy.stdout
    assert "none armed" in healthy.stdout
    assert "commit.after_publish=kill@2" in drilled.stdout


def test_doctor_says_what_is_broken_and_what_to_do(shell: Shell) -> None:
    (shell.folder / "lockstep.toml").write_text(
        '[catalogs.gone]\ntype = "rest"\nuri = "http://127.0.0.1:1"\n'
    )
    done = shell.run("doctor", "--json", env={"JAVA_HOME": str(shell.folder)})
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}

    assert done.returncode == 1
    assert checks["java"]["verdict"] == "broken"
    assert "install Java 17" in checks["java"]["todo"]
    assert checks["catalog gone"]["verdict"] == "broken"
    assert checks["catalog lake"]["verdict"] == "ok"
    assert not any("lockstep doctor" in (check["todo"] or "") for check in checks.values())


def test_a_catalog_without_a_warehouse_is_named_by_doctor_and_by_who_would_create_a_table(
    shell: Shell,
) -> None:
    (shell.folder / "lockstep.toml").write_text('[catalogs.bare]\ntype = "sql"\nuri = "sqlite:///bare.db"\n')
    (shell.folder / "rows.csv").write_text("a\n1\n")
    checks = {check["name"]: check for check in json.loads(shell.run("doctor", "--json").stdout)["checks"]}
    assert checks["catalog bare"]["verdict"] == "warning"
    assert "warehouse in [catalogs.bare]" in checks["catalog bare"]["todo"]

    done = shell.run("import", "rows.csv", "iceberg://bare/db.t", "--create")
    assert done.returncode == 2
    assert 'cannot create db.t: the catalog "bare" has no warehouse' in done.stderr
    assert "warehouse in [catalogs.bare]" in done.stderr


def test_doctor_creates_nothing(tmp_path: Path) -> None:
    done = subprocess.run([LOCKSTEP, "doctor"], cwd=tmp_path, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_help_lists_the_commands_of_the_contract(shell: Shell) -> None:
    bare = shell.run()
    text = shell.ok("--help")
    assert bare.stdout.strip() == text.strip()
    assert bare.stderr == ""
    for command in (
        *("export", "jobs", "show", "watch", "history", "kill", "pause", "resume", "retry"),
        *("worker", "partitions", "sweep", "doctor", "demo"),
    ):
        assert command in text
