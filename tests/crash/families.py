"""The kinds of jobs that the crash matrix drills."""

from __future__ import annotations

from tests.crash.drills import Family
from tests.lab import Lab


def _request_export(lab: Lab) -> tuple[str, ...]:
    return (
        *("export", lab.source(), "iceberg://lake/db.events", "--all", "--create"),
        *("--file-size", "30KB"),
    )


EXPORT = Family(
    name="export",
    failpoints=(
        "plan.before_create",
        "write.after_file",
        "write.after_checkpoint",
        "write.before_finish",
        "commit.after_intent",
        "commit.before_publish",
        "commit.after_publish",
        "commit.reply_lost",
        "commit.before_record",
        "fence.before_publish",
        "fence.after_publish",
        "unpin.before",
    ),
    prepare=lambda lab: lab.make_events(parts=2, rows=4000),
    request=_request_export,
    assert_exact=lambda lab: lab.assert_exact(),
)

FAMILIES = {family.name: family for family in (EXPORT,)}
