"""What an error of the file system or of an object store means: another try, or none.

Invalid where another try would end the same way (no right, no bucket, disk full), Retryable where it may
not (timeout, 5xx, refused).
"""

from __future__ import annotations

import errno
import os
import re
from typing import Final

from lockstep.errors import Invalid, LockstepError, Retryable

_NO_RIGHT: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_BAD_NAME: Final = frozenset({errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP})

# obstore keeps what the server said only in the text of its error.
_STATUS: Final = re.compile(r"status code: (\d{3}) ([A-Z][A-Za-z -]*)")
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
_SAID: Final = re.compile(r"<Message>([^<]{1,300})</Message>")
_SERVER: Final = re.compile(r"[A-Z]+ (https?://[^/\s]+)")
_KIND: Final = re.compile(r"HttpError \{\s*kind: (\w+)")
_SYSTEM: Final = re.compile(r'kind: \w+,\s*message: "([^"]+)"')
_NOT_ALLOWED: Final = frozenset({"401", "403"})
# Answers with another status that a second request gets as well.
_WRONG_SETTINGS: Final = frozenset(
    {"AuthorizationHeaderMalformed", "ExpiredToken", "InvalidToken", "PermanentRedirect", "InvalidBucketName"}
)
_KEYS_OF_THE_MACHINE: Final = "169.254.169.254"
"""Where a machine in a cloud asks for keys of its own, if it was given none."""
_FULL: Final = frozenset({"XMinioStorageFull", "QuotaExceeded", "XMinioAdminBucketQuotaExceeded"})


def translated(error: BaseException, verb: str, url: str) -> LockstepError:
    """An error of the file system or of obstore, as the class that says what to do."""
    if isinstance(error, LockstepError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        return _translated_os(error, verb, url)
    return _translated_object(error, verb, url)


def is_missing_object(error: BaseException) -> bool:
    return isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:500] if lines else type(error).__name__


def _translated_os(error: OSError, verb: str, url: str) -> LockstepError:
    reason = os.strerror(error.errno or 0).lower()
    said = f"cannot {verb} {url}: {reason}"
    if error.errno in _NO_SPACE:
        return Invalid(
            f"cannot {verb} {url}: the disk is full ({reason})",
            hint="make room on that disk, then `lockstep retry` the job; finished tasks are kept",
        )
    if error.errno == errno.EFBIG:
        return Invalid(said, hint="raise the limit on file sizes (ulimit -f), or pass a smaller --file-size")
    if error.errno in _NO_RIGHT:
        return Invalid(said, hint="give this user the right to do so, or choose another location")
    if error.errno in _BAD_NAME:
        return Invalid(said, hint="choose another location")
    return Retryable(said)


def _translated_object(error: BaseException, verb: str, url: str) -> LockstepError:
    from obstore import exceptions

    text = str(error)
    reason = _reason(error)
    if _KEYS_OF_THE_MACHINE in text:
        reason = f"no keys are set for it, and this machine has none of its own ({reason})"
    said = f"cannot {verb} {url}: {reason}"
    bucket = url.partition("://")[2].partition("/")[0]
    settings = f'[storage."s3://{bucket}"]'
    code = _CODE.search(text)
    status = _STATUS.search(text)
    if "NoSuchBucket" in text:
        return Invalid(
            f"cannot {verb} {url}: there is no bucket {bucket}",
            hint=f"create it, or correct the location; its settings are {settings}",
        )
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError) or (
        status and status[1] in _NOT_ALLOWED
    ):
        return Invalid(
            said, hint=f"check the keys in {settings} and their rights; then `lockstep retry` the job"
        )
    if code and code[1] in _FULL:
        return Invalid(said, hint="make room there, then `lockstep retry` the job; finished tasks are kept")
    if (code and code[1] in _WRONG_SETTINGS) or isinstance(
        error, exceptions.UnknownConfigurationKeyError | exceptions.InvalidPathError
    ):
        return Invalid(said, hint=f"correct {settings} in lockstep.toml")
    return Retryable(said, hint="`lockstep doctor` tells what works")


def _reason(error: BaseException) -> str:
    """What the server said, or why nothing came from it, without obstore's own words."""
    text = str(error)
    server = match[1] if (match := _SERVER.search(text)) else "the server"
    if status := _STATUS.search(text):
        code, said = _CODE.search(text), _SAID.search(text)
        detail = f" ({code[1]}: {said[1].rstrip('.')})" if code and said else ""
        return f"{server} answers {status[1]} {status[2].strip()}{detail}"
    if kind := _KIND.search(text):
        if kind[1] == "Timeout":
            return f"{server} did not answer in time"
        system = _SYSTEM.search(text)
        return f"{server} cannot be reached ({system[1].lower() if system else kind[1].lower()})"
    return f"{server} does not answer" if "error sending request" in text else first_line(error)
