"""`lockstep doctor`: what works on this machine, and what to do about the rest. Spark is not started."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from lockstep.cli.render import Span, line, message_lines, size
from lockstep.cli.session import Session, command
from lockstep.config import Config
from lockstep.errors import LockstepError
from lockstep.runtime import FAILPOINTS_VARIABLE, armed_failpoints, new_id
from lockstep.secrets import redact

JAVA_LEAST: Final = 17
PATIENCE_S: Final = 15.0
LOW_DISK_BYTES: Final = 2_000_000_000
_SQL: Final = ("sqlite", "postgresql")


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, and what to do where it is not well."""

    name: str
    verdict: Verdict
    detail: str
    todo: str | None = None


Look = Callable[[], Finding]
_MARKS: Final = {
    Verdict.OK: Span("✔", "green"),
    Verdict.WARNING: Span("!", "yellow"),
    Verdict.BROKEN: Span("✘", "red"),
}


@command
def doctor(session: Session) -> int:
    """Check Java, Spark, the store, the catalogs and the storage, and say what to do."""
    findings = [_look(name, look) for name, look in _looks(session)]
    width = max(len(finding.name) for finding in findings) + 1
    lines = []
    for finding in findings:
        mark = _MARKS[finding.verdict]
        first, *rest = message_lines(f" {finding.name.ljust(width)} ", finding.detail)
        lines.append(line(mark, *first.spans, indent=2))
        lines += [line(*below.spans, indent=width + 5) for below in rest]
        if finding.todo:
            lines.append(line(Span("→ ", "bold"), finding.todo, indent=width + 5))
    healthy = all(finding.verdict is not Verdict.BROKEN for finding in findings)
    session.answer({"ok": healthy, "checks": [vars(finding) for finding in findings]}, *lines)
    return 0 if healthy else 1


def _looks(session: Session) -> Iterator[tuple[str, Look]]:
    yield "python", _python
    yield "java", _java
    yield "spark", lambda: _package("spark", "pyspark", "it runs the data: pip install lockstep")
    yield (
        "chdb",
        lambda: _package("chdb", "chdb", "chdb: addresses and `lockstep demo` need it: pip install chdb"),
    )
    yield "config", lambda: _config(session.config)
    try:
        config = session.config
    except LockstepError:
        return  # said above; where the rest is cannot be known
    yield "store", lambda: _store(session)
    for name in config.catalogs:
        yield f"catalog {name}", lambda name=name: _catalog(name, config)  # type: ignore[misc]
    for place, catalog in _places(config).items():
        yield "storage", lambda at=place, of=catalog: _storage(at, of, config)  # type: ignore[misc]
    yield "failpoints", _failpoints


def _look(name: str, look: Look) -> Finding:
    """Run one check within bounds: something that hangs is a finding too, and does not hide the others."""
    found: list[Finding] = []

    def run() -> None:
        try:
            found.append(look())
        except LockstepError as error:
            found.append(Finding(name, Verdict.BROKEN, error.message, _todo(error)))
        except Exception as error:  # a check must not hide the ones after it
            found.append(Finding(name, Verdict.BROKEN, f"{type(error).__name__}: {error}".splitlines()[0]))

    thread = threading.Thread(target=run, name=f"look at {name}", daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    if found:
        return found[0]
    return Finding(
        name, Verdict.BROKEN, f"no answer within {PATIENCE_S:g} s", "check its address and the network"
    )


def _todo(error: LockstepError) -> str | None:
    """The hint, unless it sends people to where they are."""
    return None if error.hint and "lockstep doctor" in error.hint else error.hint


def _python() -> Finding:
    return Finding("python", Verdict.OK, f"{sys.version.split()[0]} at {sys.executable}")


def _java() -> Finding:
    todo = (
        f"install Java {JAVA_LEAST} or newer (Debian: apt install openjdk-17-jre-headless), or set JAVA_HOME"
    )
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        where = f"JAVA_HOME is {home}, without bin/java" if home else "no java on the PATH"
        return Finding("java", Verdict.BROKEN, where, todo)
    said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    match = re.search(r'version "(\d+)(?:\.(\d+))?[^"]*"', said.stderr + said.stdout)
    if match is None:
        return Finding("java", Verdict.BROKEN, f"{java} does not say its version", todo)
    major = int(match[2] or 0) if match[1] == "1" else int(match[1])  # Java 8 calls itself 1.8
    shown = f"{match[0].split()[1].strip(chr(34))} at {java}"
    if major < JAVA_LEAST:
        return Finding("java", Verdict.BROKEN, f"{shown}: Spark needs {JAVA_LEAST}", todo)
    return Finding("java", Verdict.OK, shown)


def _package(name: str, distribution: str, todo: str) -> Finding:
    try:
        return Finding(name, Verdict.OK, f"{distribution} {version(distribution)}")
    except PackageNotFoundError:
        return Finding(name, Verdict.BROKEN, f"the package {distribution} is not installed", todo)


def _config(config: Config) -> Finding:
    read = (
        str(config.path)
        if config.path
        else f"no lockstep.toml: the defaults hold, under {config.state_folder}"
    )
    return Finding("config", Verdict.OK, read)


def _store(session: Session) -> Finding:
    shown = redact(session.config.store_url)
    file = _sqlite_file(session.config.store_url)
    if file is not None and not file.exists():
        return _to_be_created("store", file)
    jobs = session.store.list()
    live = sum(1 for job in jobs if job.state.live)
    return Finding("store", Verdict.OK, f"{shown}: {len(jobs)} jobs, {live} of them live")


def _catalog(name: str, config: Config) -> Finding:
    from lockstep.target import open_target, warehouse_hint

    label = f"catalog {name}"
    properties = config.catalogs[name]
    uri = properties.get("uri", "")
    if uri.startswith(_SQL) and not properties.get("warehouse"):
        return Finding(label, Verdict.WARNING, "no warehouse: tables cannot be created", warehouse_hint(name))
    file = _sqlite_file(uri)
    if file is not None and not file.exists():
        return _to_be_created(label, file)
    open_target(f"iceberg://{name}/lockstep_doctor.probe", config).exists()
    return Finding(label, Verdict.OK, redact(uri) or properties.get("type", "answers"))


def _places(config: Config) -> dict[str, str | None]:
    """Where files are written: the configured storage, and the warehouses that are addresses, by catalog."""
    places: dict[str, str | None] = {}
    for name in config.catalogs:
        if "://" in (warehouse := _warehouse(name, config)):
            places[warehouse] = name
    return {**places, **{url: None for url in config.storage if url not in places}}


def _warehouse(name: str, config: Config) -> str:
    try:
        return config.catalogs[name].get("warehouse", "")
    except LockstepError:
        return ""  # the check of the catalog says why


def _storage(place: str, catalog: str | None, config: Config) -> Finding:
    if place.startswith("file://"):
        return _folder(Path(place.removeprefix("file://")))
    from lockstep.storage import Storage
    from lockstep.storage.options import with_catalog

    storage = Storage(with_catalog(config.storage, config.catalogs[catalog] if catalog else {}))
    probe = f"{place.rstrip('/')}/_lockstep_doctor_{new_id()}"
    storage.put_if_absent(probe, b"lockstep doctor")
    storage.delete(probe)
    return Finding("storage", Verdict.OK, f"{place} can be written to")


def _folder(folder: Path) -> Finding:
    existing = _nearest_existing(folder)
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding(
            "storage", Verdict.BROKEN, f"{existing} cannot be written to", "change its owner or its mode"
        )
    free = shutil.disk_usage(existing).free
    if free < LOW_DISK_BYTES:
        return Finding(
            "storage",
            Verdict.WARNING,
            f"only {size(free)} free in {folder}",
            "make room before a large export",
        )
    return Finding("storage", Verdict.OK, f"{folder} can be written to, {size(free)} free")


def _failpoints() -> Finding:
    armed = armed_failpoints()
    if not armed:
        return Finding("failpoints", Verdict.OK, "none armed")
    drills = ", ".join(f"{drill.name}={drill.action}@{drill.nth}" for drill in armed.values())
    return Finding(
        "failpoints",
        Verdict.WARNING,
        f"armed: {drills}",
        f"drills break runs on purpose: unset {FAILPOINTS_VARIABLE} unless you mean it",
    )


def _sqlite_file(url: str) -> Path | None:
    scheme, slashes, path = url.partition(":///")
    if not slashes or scheme.split("+")[0] != "sqlite" or path.startswith(":memory:"):
        return None
    return Path(path.partition("?")[0])


def _to_be_created(label: str, file: Path) -> Finding:
    existing = _nearest_existing(file.parent)
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding(
            label, Verdict.BROKEN, f"cannot create {file}: {existing} cannot be written to", "change its mode"
        )
    return Finding(label, Verdict.OK, f"will be created by the first export at {file}")


def _nearest_existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
