"""The command `lockstep`: finds the command's module, runs it, and turns errors into exit codes.

Each command lives in a module that is imported only when it is called, so that the light ones stay light.
Exit codes: 0 done, 1 the job failed, 2 invalid request, 3 conflict, 4 killed, 5 no such job, 130 interrupted.
"""

from __future__ import annotations

import difflib
import importlib
import keyword
import logging
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import typer
import typer.core
import typer.main
from typer.exceptions import TyperException

from lockstep.cli.render import print_error
from lockstep.cli.session import DEBUG_VARIABLE, INTERRUPTED, error_document, leave_at_once, print_document
from lockstep.config import STATE_FOLDER
from lockstep.errors import Invalid, LockstepError
from lockstep.runtime import SYSTEM_CLOCK, rfc3339

COMMANDS: Final = {
    "export": "export",
    "import": "imports",
    "jobs": "jobs",
    "show": "jobs",
    "watch": "jobs",
    "history": "jobs",
    "kill": "control",
    "pause": "control",
    "resume": "control",
    "retry": "control",
    "verify": "verify",
    "worker": "worker",
    "partitions": "partitions",
    "sweep": "sweep",
    "doctor": "doctor",
    "demo": "demo",
}
"""Command to module of lockstep.cli; the function has the command's name, with an underscore if it is a word
of the language."""


class Command(typer.core.TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_without_type(super().get_params(ctx))


def _flags_without_type(parameters: list[Any]) -> list[Any]:
    """The help would show `<bool>` beside each flag, which takes no value at all."""
    for parameter in parameters:
        if getattr(parameter, "is_bool_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


class LazyCommands(typer.core.TyperGroup):
    """Commands that are imported when they are asked for."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_without_type(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            near = difflib.get_close_matches(cmd_name, COMMANDS, n=1)
            raise Invalid(
                f'there is no command "{cmd_name}"',
                hint=f'did you mean "lockstep {near[0]}"?' if near else "lockstep --help lists the commands",
            )
        module = importlib.import_module(f"lockstep.cli.{COMMANDS[cmd_name]}")
        alone = typer.Typer(add_completion=False)
        function = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
        alone.command(cmd_name, cls=Command)(getattr(module, function))
        return typer.main.get_command(alone)


app = typer.Typer(cls=LazyCommands, no_args_is_help=True, add_completion=False)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"lockstep {version('lockstep')}")
        raise typer.Exit


@app.callback()
def lockstep(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and leave."
    ),
) -> None:
    """Exactly-once bulk export and import for Apache Iceberg: durable jobs that survive the loss of any
    process."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script: never returns, and shows no traceback of an error that was raised on purpose."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--debug" not in given and not os.environ.get(DEBUG_VARIABLE):
        _quiet_libraries()
    code = run(given)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _mute_standard_output()
    if code == INTERRUPTED:
        # Threads that still wait for a storage or a catalog must not hold up somebody who wants to leave.
        leave_at_once(code)
    sys.exit(code)


def _quiet_libraries() -> None:
    """What a person has to know is said by us, once; what libraries log and warn about beside it is noise."""
    logging.getLogger().addHandler(logging.NullHandler())
    warnings.simplefilter("ignore")


def run(arguments: list[str]) -> int:
    """Run one command and answer with its exit code."""
    as_json = "--json" in arguments
    try:
        code = app(arguments, prog_name="lockstep", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except LockstepError as error:
        return _refused(error, as_json)
    except TyperException as error:
        if not error.format_message():
            return Invalid.exit_code  # no command at all: the help that was printed says everything
        name = arguments[0] if arguments and arguments[0] in COMMANDS else "COMMAND"
        usage = f"lockstep {name} --help lists the options"
        return _refused(Invalid(error.format_message(), hint=usage), as_json)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader went away (`lockstep jobs | head`): there is nobody to tell.
        _mute_standard_output()
        return 0
    except Exception as error:
        return _unexpected(error, as_json)


def _refused(error: LockstepError, as_json: bool) -> int:
    if as_json:
        print_document(error_document(error))
    print_error(error)
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    return error.exit_code


def _unexpected(error: Exception, as_json: bool) -> int:
    """A fault of ours or of a library: one line for the person, the traceback where it can be found."""
    summary = f"{type(error).__name__}: {error}".splitlines()[0]
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
        hint = None
    else:
        hint = f"the traceback is in {_keep_traceback()}; --debug or {DEBUG_VARIABLE}=1 shows it"
    shown = LockstepError(f"unexpected {summary}", hint=hint)
    if as_json:
        document = error_document(shown)
        document["error"]["class"] = type(error).__name__
        print_document(document)
    print_error(shown)
    return 1


def _keep_traceback() -> Path:
    text = f"{rfc3339(SYSTEM_CLOCK.now())} lockstep {' '.join(sys.argv[1:2])}\n{traceback.format_exc()}\n"
    for folder in (Path(STATE_FOLDER), Path(tempfile.gettempdir())):
        path = folder / "lockstep-errors.log"
        try:
            if folder.is_dir():
                with path.open("a", encoding="utf-8") as log:
                    log.write(text)
                return path
        except OSError:
            continue  # this folder cannot be written to; the next one may be
    sys.stderr.write(text)
    return Path("standard error")


def _mute_standard_output() -> None:
    """Keep the interpreter from failing once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
