"""One execution of a task, inside an executor: read, write, checkpoint, obey.

The attempt keeps the rule of lock step: the position it reports is covered by the files it reports in the
same call. It stops when the driver says so, or when the driver is gone.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any, Final

from lockstep.config import Config
from lockstep.engine.channel import Channel
from lockstep.errors import ErrorInfo, Fenced
from lockstep.job import Json, Lease, Plan, Position, Progress, StagedFile, Verdict
from lockstep.pipeline import Pipeline, open_pipeline
from lockstep.runtime import SYSTEM_CLOCK, failpoint

HEARTBEAT_S: Final = 1.0


@dataclass(frozen=True)
class Assignment:
    """All that an executor needs for one task. It travels inside Spark's closure, never to a log."""

    lease: Lease
    plan: Json
    descriptor: Json
    source_address: str
    config: Config
    driver: tuple[str, int]
    secret: str


class Stopped(Exception):
    """The driver told this attempt to stop."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict)
        self.verdict = verdict


def run_attempt(assignment: Assignment) -> None:
    """Run a task to its end, or until it must stop.

    A failure is told to the driver and not raised: Spark re-runs what died, Lockstep what failed.
    """
    channel = Channel(assignment.driver, assignment.secret)
    try:
        begun = channel.call("begin", {"lease": vars(assignment.lease), "pid": os.getpid()})
    except Fenced:
        channel.close()
        return
    lease = Lease(**begun["lease"])
    link = Link(channel, lease, Progress(begun["rows_done"], begun["bytes_done"]))
    try:
        _run(assignment, link, begun["position"])
    except Stopped:
        link.give_back()
    except Fenced:
        pass  # a newer attempt has the task, or the driver is gone: there is nothing to give back
    except Exception as error:  # every failure spends the task's budget, whatever its class
        link.report(error)
    finally:
        link.close()


class Link:
    """An attempt's side of the channel: a heartbeat in the background, the verbs in the foreground."""

    def __init__(self, channel: Channel, lease: Lease, progress: Progress) -> None:
        self._channel = channel
        self.lease = lease
        self._verdict = Verdict.GO_ON
        self._ended = threading.Event()
        self._rows = progress.rows
        self._staged_bytes = progress.size_bytes
        self._pending_bytes = 0
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def progress(self) -> Progress:
        return Progress(self._rows, self._staged_bytes + self._pending_bytes)

    def advance(self, rows: int, pending_bytes: int) -> None:
        """Note rows that were added to the sink; the next heartbeat tells the driver."""
        self._rows += rows
        self._pending_bytes = pending_bytes

    def obey(self) -> None:
        """Raises: Stopped if the driver wants this attempt to stop at once."""
        if self._verdict is Verdict.STOP:
            raise Stopped(self._verdict)

    @property
    def pause_asked(self) -> bool:
        return self._verdict is Verdict.PAUSE

    def checkpoint(self, position: Position, staged: list[StagedFile]) -> None:
        """Raises: Stopped if the answer is not to go on; Fenced if the lease is lost."""
        verdict = Verdict(self._call("checkpoint", position, staged))
        if verdict is not Verdict.GO_ON:
            raise Stopped(verdict)

    def finish(self, position: Position, staged: list[StagedFile]) -> None:
        self._call("finish", position, staged)

    def report(self, error: Exception) -> None:
        info = ErrorInfo.of(error, self.lease.index)
        self._quietly("fail", {"lease": vars(self.lease), "error": info.to_json()})

    def give_back(self) -> None:
        self._quietly("release", {"lease": vars(self.lease)})

    def close(self) -> None:
        self._ended.set()
        self._channel.close()

    def _call(self, verb: str, position: Position, staged: list[StagedFile]) -> Any:
        self._staged_bytes += sum(file.size_bytes for file in staged)
        self._pending_bytes = 0
        return self._channel.call(
            verb,
            {
                "lease": vars(self.lease),
                "position": position,
                "staged": [file.to_json() for file in staged],
                "progress": vars(self.progress),
            },
        )

    def _quietly(self, verb: str, body: Json) -> None:
        try:
            self._channel.call(verb, body)
        except Fenced:
            return  # the driver is gone or knows already: the lease runs out by itself

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            try:
                answer = self._channel.call(
                    "heartbeat", {"lease": vars(self.lease), "progress": vars(self.progress)}
                )
            except Fenced:
                self._verdict = Verdict.STOP
                return
            self._verdict = Verdict(answer)


def _run(assignment: Assignment, link: Link, position: Position | None) -> None:
    plan = Plan.from_json(assignment.plan)
    pipeline = open_pipeline(
        plan, link.lease, assignment.descriptor, assignment.source_address, assignment.config
    )
    try:
        last = _pump(pipeline, link, position)
        staged = _flushed(pipeline, link)
        if link.lease.stage == "write":
            failpoint("write.before_finish")
        link.obey()
        link.finish(last or {}, staged)
    except BaseException:
        pipeline.sink.abort()
        raise
    finally:
        pipeline.close()


def _pump(pipeline: Pipeline, link: Link, position: Position | None) -> Position | None:
    checkpointed_at = SYSTEM_CLOCK.now()
    for chunk in pipeline.read(position):
        link.obey()
        pipeline.add(chunk)
        link.advance(chunk.batch.num_rows, pipeline.sink.pending_bytes)
        if chunk.position is None:
            continue
        position = chunk.position
        waited_s = SYSTEM_CLOCK.now() - checkpointed_at
        due = pipeline.checkpoint_s is not None and waited_s >= pipeline.checkpoint_s
        if pipeline.sink.full or link.pause_asked or due:
            link.checkpoint(position, _flushed(pipeline, link))
            checkpointed_at = SYSTEM_CLOCK.now()
            _checkpointed(link.lease.stage)
    return position


def _flushed(pipeline: Pipeline, link: Link) -> list[StagedFile]:
    staged = pipeline.flush()
    if staged:
        _written(link.lease.stage)
    return staged


def _written(stage: str) -> None:
    """Files are there that no checkpoint lists yet. Sinks of data files have failpoints of their own."""
    if stage == "map":
        failpoint("map.after_run")
    elif stage in ("combine", "recombine"):
        failpoint("combine.after_run")
    elif stage == "unique":
        failpoint("unique.after_file")


def _checkpointed(stage: str) -> None:
    if stage == "write":
        failpoint("write.after_checkpoint")
    elif stage == "map":
        failpoint("map.after_checkpoint")
