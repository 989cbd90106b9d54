"""Secrets of addresses and settings: filled in when they are used, kept when a job is stored, never printed.

`${NAME}` stands for a secret. This module imports nothing heavy, because every command needs it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote

from lockstep.errors import Invalid

if TYPE_CHECKING:
    from lockstep.config import Config

SECRET_PREFIX: Final = "LOCKSTEP_SECRET_"  # noqa: S105 - a name, not a secret
_PLACEHOLDER: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
SCHEME: Final = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")
_SECRET_PARAMETER: Final = re.compile(
    r"(?P<before>[?&](?P<name>[^=&#]*(?:password|passwd|secret|token|access_key|credential)[^=&#]*)=)"
    r"(?P<value>[^&#]*)",
    re.IGNORECASE,
)


def expand(text: str, config: Config | None = None) -> str:
    """Fill each `${NAME}` from the environment, else from the secrets that `protect` kept for `config`.

    Where a placeholder stands for a user or a password of an address, its value is percent-encoded, so
    that a secret may hold any character.
    Raises: Invalid if a name is set nowhere, saying which.
    """
    user_end = _userinfo_end(text)

    def fill(match: re.Match[str]) -> str:
        value = _lookup(match[1], config)
        return quote(value, safe="") if match.start() < user_end else value

    return _PLACEHOLDER.sub(fill, text)


def _lookup(name: str, config: Config | None) -> str:
    if name in os.environ:
        return os.environ[name]
    kept = _read_secrets(config).get(name) if config else None
    if kept is not None:
        return _PLACEHOLDER.sub(lambda match: _lookup(match[1], None), kept)
    if name.startswith(SECRET_PREFIX):
        raise Invalid(
            f"the password behind ${{{name}}} is not known on this machine",
            hint=f"set {name} to it, or work from the folder where the job was created",
        )
    raise Invalid(f"the environment variable {name} is not set", hint=f"export {name}=… and try again")


def protect(address: str, config: Config) -> str:
    """The address with every literal secret replaced by `${LOCKSTEP_SECRET_…}`; fit to be stored.

    The values are kept in `.lockstep/secrets.json`, readable by its owner only, where `expand` finds them.
    An address without a literal secret is returned as it is, and nothing is written.
    Raises: Invalid if the password would be cut by the address's own syntax, or cannot be kept.
    """
    kept: dict[str, str] = {}
    protected = _replace_secrets(address, lambda owner, secret: _keep(owner, secret, kept))
    if kept:
        _add_secrets(config, kept)
    return protected


def redact(address: str) -> str:
    """The address as it may be printed: literal secrets become `***`; `${NAME}` stays."""
    return _replace_secrets(address, lambda _owner, _secret: "***", strict=False)


def _keep(owner: str, secret: str, kept: dict[str, str]) -> str:
    name = SECRET_PREFIX + hashlib.sha256(owner.encode()).hexdigest()[:8].upper()
    kept[name] = unquote(secret)
    return f"${{{name}}}"


def _userinfo_end(address: str) -> int:
    """Where the userinfo of an address ends (its `@`), or 0 where it has none."""
    scheme = SCHEME.match(address)
    if not scheme:
        return 0
    authority_end = next((i for i, c in enumerate(address) if c in "/?#" and i >= scheme.end()), len(address))
    return max(0, address.rfind("@", scheme.end(), authority_end))


def _replace_secrets(address: str, replace: Callable[[str, str], str], *, strict: bool = True) -> str:
    """Hand each literal secret, with whose it is, to `replace`."""
    scheme = SCHEME.match(address)
    if not scheme:
        return address
    at = _userinfo_end(address)
    if not at:
        at = _unescaped_password_end(address, scheme.end(), strict)
    if at:
        user, colon, password = address[scheme.end() : at].partition(":")
        host = re.split(r"[/?#]", address[at + 1 :], maxsplit=1)[0]
        if colon and password and not _only_placeholders(password):
            password = replace(f"{user}@{host}", password)
        address = f"{address[: scheme.end()]}{user}{colon}{password}{address[at:]}"

    def parameter(match: re.Match[str]) -> str:
        value = match["value"]
        if not value or _only_placeholders(value):
            return match[0]
        return match["before"] + replace(f"{match['name']}@{address[: match.start()]}", value)

    return _SECRET_PARAMETER.sub(parameter, address)


def _unescaped_password_end(address: str, start: int, strict: bool) -> int:
    """A password with a bare `/` in it ends the authority too early: refuse it, or hide all of it."""
    authority = re.split(r"[/?#]", address[start:], maxsplit=1)[0]
    _, colon, port = authority.partition(":")
    if not address.startswith("clickhouse") or "@" not in address[start:] or not colon or port.isdigit():
        return 0
    if strict:
        raise Invalid(
            "the address has a password with a character that ends it early",
            hint='write "/" as %2F, "?" as %3F and "#" as %23, or put it in a variable: user:${NAME}@host',
        )
    return address.rfind("@")


def _only_placeholders(text: str) -> bool:
    return _PLACEHOLDER.sub("", text) == ""


def _secrets_path(config: Config) -> Path:
    return config.state_folder / "secrets.json"


def _read_secrets(config: Config) -> dict[str, str]:
    path = _secrets_path(config)
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise Invalid(
            f"cannot read the kept passwords in {path}: {error}",
            hint="repair or delete the file; passwords can also come from variables: user:${NAME}@host",
        ) from error


def _add_secrets(config: Config, kept: Mapping[str, str]) -> None:
    """Replace the whole file in one step; it is never readable by others, not even for a moment."""
    path = _secrets_path(config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / "secrets.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            secrets = {**_read_secrets(config), **kept}
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=".secrets-")  # mkstemp makes it 0600
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(dict(sorted(secrets.items())), file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
    except OSError as error:
        raise Invalid(
            f"cannot keep the password of the address in {path}: {error.strerror or error}",
            hint="put it in a variable and write user:${NAME}@host",
        ) from error
