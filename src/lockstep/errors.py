"""Every error that Lockstep raises on purpose.

LockstepError
 ├─ Invalid         the request or the configuration is wrong; nothing was created
 ├─ Conflict        an earlier job holds the same rows; carries its id
 ├─ NoSuchJob       no job has this id or prefix
 ├─ Retryable       storage down, 5xx, timeout, lost executor: wait and try again, within the budget
 ├─ Fenced          a newer attempt exists, or the job was stopped: write nothing more
 ├─ CommitUnknown   no proof whether a commit landed: read the register
 ├─ Corrupt         bytes are not what the plan says: fail at once, keep the evidence
 └─ Incompatible    a plan or a store was written by a newer version

What to do follows from the class, never from the text of a message. An exception of any other
class counts as retryable, and spends the budget.
"""

from __future__ import annotations

from dataclasses import dataclass


class LockstepError(Exception):
    """A message for the person at the terminal, and a hint about what to do."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Invalid(LockstepError):
    exit_code = 2


class Conflict(LockstepError):
    exit_code = 3

    def __init__(self, message: str, *, job_id: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.job_id = job_id


class NoSuchJob(LockstepError):
    exit_code = 5


class Retryable(LockstepError):
    pass


class Fenced(LockstepError):
    pass


class CommitUnknown(LockstepError):
    pass


class Corrupt(LockstepError):
    pass


class Incompatible(LockstepError):
    exit_code = 2


# A task that raises one of these is not tried again: another attempt would end the same way.
PERMANENT = (Invalid, Corrupt, Conflict, Incompatible)


@dataclass(frozen=True)
class ErrorInfo:
    """An error as it is stored in a job and shown to the user."""

    cls: str
    message: str
    hint: str | None = None
    task: int | None = None
    at: float | None = None
    """When it happened, where that is worth telling: seconds since the Unix epoch."""

    @classmethod
    def of(cls, error: BaseException, task: int | None = None) -> ErrorInfo:
        if isinstance(error, LockstepError):
            return cls(type(error).__name__, error.message, error.hint, task)
        return cls(type(error).__name__, str(error) or type(error).__name__, None, task)

    def to_json(self) -> dict[str, object]:
        raw: dict[str, object] = {
            "class": self.cls,
            "message": self.message,
            "hint": self.hint,
            "task": self.task,
        }
        return raw if self.at is None else {**raw, "at": self.at}

    @classmethod
    def from_json(cls, raw: dict[str, object] | None) -> ErrorInfo | None:
        if raw is None:
            return None
        task = raw.get("task")
        hint = raw.get("hint")
        at = raw.get("at")
        return cls(
            str(raw["class"]),
            str(raw["message"]),
            None if hint is None else str(hint),
            task if isinstance(task, int) else None,
            float(at) if isinstance(at, int | float) else None,
        )

    @property
    def permanent(self) -> bool:
        return self.cls in {error.__name__ for error in PERMANENT}
