"""Index only the tasks that are open by the time at which they are free.

With all tasks in it, PostgreSQL took this index for the look-up of one task by its key, as long as it had no
statistics of the table, and read every task of the job.

Revision ID: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    is_open = sa.text("free_at IS NOT NULL")
    op.drop_index("lockstep_tasks_free", "lockstep_tasks")
    op.create_index(
        "lockstep_tasks_open",
        "lockstep_tasks",
        ["job_id", "stage", "free_at", "idx"],
        sqlite_where=is_open,
        postgresql_where=is_open,
    )
