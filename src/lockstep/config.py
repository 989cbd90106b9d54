"""lockstep.toml: where the store, the catalogs and the storage are, and what a job may spend.

With no file at all the defaults hold, and everything lives in `.lockstep/` under the working folder.
This module imports nothing heavy, because every command reads its configuration.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from lockstep.errors import Invalid
from lockstep.job import Limits
from lockstep.secrets import SCHEME, expand

CONFIG_NAME: Final = "lockstep.toml"
CONFIG_VARIABLE: Final = "LOCKSTEP_CONFIG"
STATE_FOLDER: Final = ".lockstep"
WEEK_S: Final = 604_800.0

_SECTIONS: Final = ("store", "spark", "catalogs", "storage", "limits", "clickhouse")
_LIMITS: Final = (
    "task_memory",
    "lease_s",
    "task_attempts",
    "task_deadline_s",
    "commit_attempts",
    "commit_deadline_s",
    "finished_job_ttl_s",
)
# Catalogs that keep their files where the warehouse says; for the others it may be a mere name.
_WAREHOUSE_IS_A_PATH: Final = frozenset({"sql", "in-memory", "filesystem"})


@dataclass(frozen=True)
class Config:
    """What lockstep.toml says, with every `${NAME}` filled in and every relative path made absolute."""

    root: Path
    store_url: str = field(repr=False)
    spark: Mapping[str, str] = field(repr=False)
    catalogs: Mapping[str, Mapping[str, str]] = field(repr=False)
    storage: Mapping[str, Mapping[str, str]] = field(repr=False)
    limits: Limits = field(default_factory=Limits)
    finished_job_ttl_s: float = WEEK_S
    clickhouse: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None
    """The file that was read, or None where the defaults hold."""

    @property
    def state_folder(self) -> Path:
        """Where the embedded defaults, the kept secrets and the logs live. It may not exist yet."""
        return self.root / STATE_FOLDER

    def check(self) -> None:
        """Raises: Invalid if a catalog or a storage names a variable that is not set."""
        for section in (self.catalogs, self.storage):
            for name in section:
                section[name]


class Sections(Mapping[str, Mapping[str, str]]):
    """Catalogs or storages by name. One with a wrong value, such as a `${NAME}` that is not set, raises
    Invalid when it is asked for."""

    def __init__(self) -> None:
        self._ready: dict[str, dict[str, str]] = {}
        self._broken: dict[str, Invalid] = {}
        self._names: dict[str, None] = {}

    def read(self, name: str, values: Callable[[], dict[str, str]]) -> None:
        """Take the values under `name`, in place of earlier ones, or remember why there are none."""
        self._names[name] = None
        self._ready.pop(name, None)
        try:
            self._ready[name] = values()
        except Invalid as error:
            self._broken[name] = error

    def __getitem__(self, name: str) -> Mapping[str, str]:
        if (error := self._broken.get(name)) is not None:
            raise Invalid(error.message, hint=error.hint)  # a new one: each has a traceback of its own
        return self._ready[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def load_config(path: Path | None = None, *, strict: bool = True) -> Config:
    """Read `path`, else the file that LOCKSTEP_CONFIG names, else lockstep.toml of the working folder.

    With `strict` False a catalog or a storage whose `${NAME}` is not set raises when it is used, so that
    commands that need none of them work.
    Raises: Invalid for a named file that is missing, for TOML that does not parse, for an unknown key
    (naming the nearest known one), for a value of the wrong kind, and for a `${NAME}` that is not set.
    """
    found = _find(path)
    raw = _parse(found) if found else {}
    root = Path(os.path.abspath(found.parent if found else Path.cwd()))
    where = found.name if found else CONFIG_NAME
    _known("section", raw, _SECTIONS, where)
    config = Config(
        root=root,
        store_url=_store_url(_table(raw, "store", where), root, where),
        spark=_spark(_table(raw, "spark", where), where),
        catalogs=_catalogs(_table(raw, "catalogs", where), root, where),
        storage=_storage(_table(raw, "storage", where), where),
        limits=_limits(_table(raw, "limits", where), where),
        finished_job_ttl_s=_duration_of(raw.get("limits", {}), "finished_job_ttl_s", WEEK_S, where),
        clickhouse=_clickhouse(_table(raw, "clickhouse", where), where),
        path=found,
    )
    if strict:
        config.check()
    return config


def _find(path: Path | None) -> Path | None:
    named = path or (Path(text) if (text := os.environ.get(CONFIG_VARIABLE)) else None)
    if named is None:
        here = Path.cwd() / CONFIG_NAME
        return here if here.is_file() else None
    if not named.is_file():
        said_by = "--config" if path else CONFIG_VARIABLE
        raise Invalid(
            f"there is no configuration file {named}", hint=f"{said_by} names it; correct or drop it"
        )
    return Path(os.path.abspath(named))


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"{path} is not valid TOML: {error}") from error
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror or error}") from error


def _known(kind: str, given: Iterable[str], known: Iterable[str], where: str) -> None:
    names = sorted(known)
    for name in given:
        if name not in names:
            raise Invalid(f'{where}: unknown {kind} "{name}"', hint=_nearest(name, names))


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    # The last word of a dotted key is what people get wrong, so both forms are compared.
    words = {key.rpartition(".")[2]: key for key in names}
    close = difflib.get_close_matches(name.lower(), [*names, *words], n=1, cutoff=0.5)
    if close:
        return f'did you mean "{words.get(close[0], close[0])}"?'
    return "known: " + ", ".join(names)


def _table(raw: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    table = raw.get(name, {})
    if not isinstance(table, dict):
        raise Invalid(f"{where}: {name} must be a table", hint=f"write [{name}] on a line of its own")
    return table


def _text(value: Any, key: str, where: str) -> str:
    """A scalar of TOML as the text that PyIceberg, Spark and obstore take, with `${NAME}` filled in."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        try:
            return expand(value)
        except Invalid as error:
            raise Invalid(f"{where}: {key}: {error.message}", hint=error.hint) from error
    if isinstance(value, int | float):
        return str(value)
    raise Invalid(f"{where}: {key} must be text, a number or true/false")


def _flat(table: Mapping[str, Any], prefix: str, where: str) -> dict[str, str]:
    """One level of keys: TOML reads `s3.endpoint = …` as a table in a table, the libraries want the dots."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            inner = _flat(value, f"{prefix}.{key}", where)
            flat.update({f"{key}.{name}": text for name, text in inner.items()})
        else:
            flat[key] = _text(value, f"{prefix}.{key}", where)
    return flat


def _store_url(table: Mapping[str, Any], root: Path, where: str) -> str:
    _known("key of [store]", table, ("url",), where)
    url = _text(table.get("url", f"sqlite:///{STATE_FOLDER}/jobs.db"), "store.url", where)
    if not SCHEME.match(url):
        raise Invalid(
            f'{where}: store.url "{url}" is not an address',
            hint=f'for example "sqlite:///{STATE_FOLDER}/jobs.db"',
        )
    return absolute_sqlite(url, root)


def _spark(table: Mapping[str, Any], where: str) -> dict[str, str]:
    settings = _flat(table, "spark", where)
    for key in settings:
        if key != "master" and not key.startswith("spark."):
            raise Invalid(
                f'{where}: unknown key of [spark] "{key}"',
                hint='did you mean "master"?'
                if difflib.get_close_matches(key, ["master"])
                else f'Spark\'s own settings keep their full name; did you mean "spark.{key}"?',
            )
    return {"master": "local[*]", **settings}


def _catalogs(table: Mapping[str, Any], root: Path, where: str) -> Sections:
    catalogs = Sections()
    catalogs.read("lake", lambda: _default_catalog(root))
    for name, properties in table.items():
        if not isinstance(properties, dict):
            raise Invalid(
                f"{where}: catalogs.{name} must be a table of PyIceberg's catalog properties",
                hint=f"write [catalogs.{name}] on a line of its own",
            )
        flat = partial(_flat, properties, f"catalogs.{name}", where)
        catalogs.read(name, lambda flat=flat: _placed(flat(), root))  # type: ignore[misc]
    return catalogs


def _default_catalog(root: Path) -> dict[str, str]:
    return _placed(
        {
            "type": "sql",
            "uri": f"sqlite:///{STATE_FOLDER}/catalog.db",
            "warehouse": f"{STATE_FOLDER}/warehouse",
        },
        root,
    )


def _placed(properties: dict[str, str], root: Path) -> dict[str, str]:
    """The same properties with local paths made absolute; all other values are PyIceberg's business."""
    placed = dict(properties)
    if "uri" in placed:
        placed["uri"] = absolute_sqlite(placed["uri"], root)
    kind = placed.get("type") or ("sql" if placed.get("uri", "").startswith(("sqlite", "postgresql")) else "")
    warehouse = placed.get("warehouse", "")
    if warehouse and kind in _WAREHOUSE_IS_A_PATH and not SCHEME.match(warehouse):
        # file:// is the form that PyIceberg, Spark and DuckDB all read back from the table's metadata.
        placed["warehouse"] = "file://" + os.path.abspath(root / Path(warehouse).expanduser())
    return placed


def absolute_sqlite(url: str, root: Path) -> str:
    """A SQLite address whose file does not depend on the working folder; other addresses as they are."""
    scheme, slashes, path = url.partition(":///")
    if not slashes or scheme.split("+")[0] != "sqlite" or not path or path.startswith((":memory:", "file:")):
        return url
    file, question, options = path.partition("?")
    return f"{scheme}:///{os.path.abspath(root / Path(file).expanduser())}{question}{options}"


def _storage(table: Mapping[str, Any], where: str) -> Sections:
    storage = Sections()
    for prefix, options in table.items():
        if not SCHEME.match(prefix) or not isinstance(options, dict):
            raise Invalid(
                f'{where}: [storage."{prefix}"] does not name a storage address',
                hint='for example [storage."s3://bucket"], with the options of obstore below it',
            )
        storage.read(prefix, partial(_flat, options, f"storage.{prefix}", where))
    return storage


def _limits(table: Mapping[str, Any], where: str) -> Limits:
    _known("key of [limits]", table, _LIMITS, where)
    default = Limits()
    return Limits(
        task_memory_bytes=_size_of(table, "task_memory", default.task_memory_bytes, where),
        lease_s=_duration_of(table, "lease_s", default.lease_s, where),
        task_attempts=_count_of(table, "task_attempts", default.task_attempts, where),
        task_deadline_s=_duration_of(table, "task_deadline_s", default.task_deadline_s, where),
        commit_attempts=_count_of(table, "commit_attempts", default.commit_attempts, where),
        commit_deadline_s=_duration_of(table, "commit_deadline_s", default.commit_deadline_s, where),
    )


def _clickhouse(table: Mapping[str, Any], where: str) -> dict[str, str]:
    _known("key of [clickhouse]", table, ("pin_database",), where)
    return _flat(table, "clickhouse", where)


def _size_of(table: Mapping[str, Any], key: str, default: int, where: str) -> int:
    return parse_size(table[key], f"{where}: limits.{key}") if key in table else default


def _duration_of(table: Mapping[str, Any], key: str, default: float, where: str) -> float:
    return parse_duration(table[key], f"{where}: limits.{key}") if key in table else default


def _count_of(table: Mapping[str, Any], key: str, default: int, where: str) -> int:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Invalid(f"{where}: limits.{key} must be a whole number of at least 1, not {value!r}")
    return value


# Sizes and durations


LEAST_SIZE_BYTES: Final = 1000
_SIZE_UNITS: Final = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}
_DURATION_UNITS: Final = {
    "ms": 0.001,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": WEEK_S,
}
_DURATION_PIECE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|min|s|m|h|d|w)\s*")


def parse_size(value: Any, name: str) -> int:
    """Bytes: a number, or text such as "512MB" (powers of 1000) or "256MiB" (powers of 1024).

    Raises: Invalid, calling the value `name`; also for less than anybody means, mostly a forgotten unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value).lower())
    if isinstance(value, bool) or match is None or match[2] not in _SIZE_UNITS:
        raise Invalid(f'{name} "{value}" is not a size', hint='write for example "512MB" or "256MiB"')
    size = int(float(match[1]) * _SIZE_UNITS[match[2]])
    if size < LEAST_SIZE_BYTES:
        number = f"{float(match[1]):g}"
        raise Invalid(
            f'{name} "{value}" is {size} bytes; the least is 1KB ({LEAST_SIZE_BYTES} bytes)',
            hint=f'did you mean "{number}MB"?' if size else 'write for example "512MB" or "256MiB"',
        )
    return size


def parse_duration(value: Any, name: str) -> float:
    """Seconds: a number, or text such as "90s", "1h30m" or "7d".

    Raises: Invalid, calling the value `name`.
    """
    text = str(value).strip().lower()
    pieces = _DURATION_PIECE.findall(text)
    if not isinstance(value, bool) and re.fullmatch(r"\d+(?:\.\d+)?", text):
        seconds = float(text)
    elif pieces and "".join(_DURATION_PIECE.sub("", text).split()) == "":
        seconds = sum(float(number) * _DURATION_UNITS[unit] for number, unit in pieces)
    else:
        raise Invalid(f'{name} "{value}" is not a duration', hint='write for example "90s", "1h30m" or "6h"')
    if seconds <= 0:
        raise Invalid(f'{name} "{value}" must be longer than nothing')
    return seconds
