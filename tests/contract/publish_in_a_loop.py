"""One of two processes that publish to the same table at the same time: as the commit does, until each is in.

Arguments: the lake's folder, its kind of catalog, a name for the jobs, and a file with the staged files, one
for each job.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lockstep.errors import CommitUnknown, Retryable
from lockstep.job import StagedFile, commit_id
from lockstep.target import Outcome
from tests.iceberg_tables import Lake


def publish(lake: Lake, job: str, file: StagedFile) -> None:
    for _ in range(200):
        try:
            head = lake.target.load()
            if lake.target.outcome(head, commit_id(job, 1))[0] is Outcome.COMMITTED:
                return
            lake.commit(head, lake.plan(head), commit_id(job, 1), job, [file])
        except (CommitUnknown, Retryable):
            continue
    raise SystemExit(f"{job} did not get through")


def main() -> None:
    lake, name = Lake(Path(sys.argv[1]), kind=sys.argv[2]), sys.argv[3]
    for number, raw in enumerate(json.loads(Path(sys.argv[4]).read_text())):
        publish(lake, f"{name} {number}", StagedFile.from_json(raw))


if __name__ == "__main__":
    main()
