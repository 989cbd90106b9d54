"""What every command has at hand: its configuration, the store, and one place that answers.

Standard output holds the answer and nothing else: with `--json` one document. Progress, errors and hints
go to standard error.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TextIO

import typer

from lockstep.cli.render import Grid, Line, Screen
from lockstep.config import Config, load_config
from lockstep.errors import Conflict, Invalid, LockstepError, NoSuchJob
from lockstep.job import Job
from lockstep.runtime import SYSTEM_CLOCK, Clock, armed_failpoints

if TYPE_CHECKING:
    from lockstep.store import JobStore

DEBUG_VARIABLE: Final = "LOCKSTEP_DEBUG"
INTERRUPTED: Final = 130

Answer = Grid | Line | str
JsonFlag = Annotated[bool, typer.Option("--json", help="Answer with one JSON document on standard output.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="The configuration file; else ./lockstep.toml.", metavar="FILE"),
]
DebugFlag = Annotated[bool, typer.Option("--debug", help="Show the traceback of an unexpected error.")]


@dataclass
class Session:
    config_path: Path | None
    json: bool
    out: TextIO
    clock: Clock = SYSTEM_CLOCK

    @cached_property
    def config(self) -> Config:
        """A catalog or a storage with an unset variable raises when it is used, not before."""
        return load_config(self.config_path, strict=False)

    def check_config(self) -> None:
        """For commands that start work: what is not set now must not fail a job later.

        Raises: Invalid for a variable that is not set, wherever it is named.
        """
        self.config.check()

    @cached_property
    def store(self) -> JobStore:
        from lockstep.store import open_store

        return open_store(self.config.store_url)

    @cached_property
    def screen(self) -> Screen:
        """Where answers for people go."""
        return Screen(self.out)

    @cached_property
    def side(self) -> Screen:
        """Where progress, remarks and errors go."""
        return Screen(sys.stderr)

    def job(self, prefix: str) -> Job:
        """The job that an id or a prefix of one names.

        Raises: NoSuchJob, or Invalid if several begin like that.
        """
        if not prefix.strip():
            raise NoSuchJob("a job id cannot be empty", hint="`lockstep jobs` lists them")
        return self.store.find(prefix.strip().lower())

    def answer(self, document: Any, *parts: Answer) -> None:
        """Print the document with `--json`, else the parts that say the same to a person."""
        if self.json:
            print_document(document)
        else:
            for part in parts:
                self.screen.print(part)

    def remark(self, *parts: Answer) -> None:
        """Say something that is not the answer."""
        for part in parts:
            self.side.print(part)

    def close(self) -> None:
        if "store" in self.__dict__:
            self.store.close()


def command(function: Callable[..., int]) -> Callable[..., int]:
    """Turn `function(session, …) -> exit code` into a command with the options that all of them have."""
    signature = inspect.signature(function, eval_str=True)
    own = [parameter for name, parameter in signature.parameters.items() if name != "session"]
    common = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, default, annotation in (
            ("json_output", False, JsonFlag),
            ("config_file", None, ConfigFile),
            ("debug", False, DebugFlag),
        )
    ]

    @functools.wraps(function)
    def run(*, json_output: bool, config_file: Path | None, debug: bool, **arguments: Any) -> int:
        if debug:
            os.environ[DEBUG_VARIABLE] = "1"
        armed_failpoints()  # a drill with a wrong name would never happen, and nobody would know
        session = Session(config_file, json_output, json_stream() if json_output else sys.stdout)
        try:
            return function(session, **arguments)
        finally:
            session.close()

    parameters = [*own, *common]
    # Typer reads both the signature and the annotations.
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@contextmanager
def nothing_created() -> Iterator[None]:
    """Where a server that does not answer means the same to a script as a wrong request: exit code 2."""
    try:
        yield
    except LockstepError as error:
        if error.exit_code == LockstepError.exit_code:
            error.exit_code = Invalid.exit_code
        raise


@functools.cache
def json_stream() -> TextIO:
    """A private copy of standard output. From now on whatever else is printed goes to standard error, so
    that no library can write into the document."""
    sys.stdout.flush()
    private = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return private


def leave_at_once(code: int) -> NoReturn:
    """End the process without waiting for threads: what they hold runs out by itself."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def print_document(document: Any) -> None:
    out = json_stream()
    json.dump(document, out, ensure_ascii=False, indent=2)
    out.write("\n")
    out.flush()


def error_document(error: LockstepError) -> dict[str, Any]:
    document: dict[str, Any] = {
        "class": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
    }
    if isinstance(error, Conflict):
        document["job_id"] = error.job_id
    return {"error": document}
