"""Note since when, and from which row on, the pace of a job is measured.

A pace since the job's start would count the time in which nobody worked on it, and the rows of one stage over
the time of all.

Revision ID: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("lockstep_jobs", sa.Column("paced_at", sa.Double))
    op.add_column(
        "lockstep_jobs", sa.Column("paced_rows", sa.BigInteger, nullable=False, server_default=sa.text("0"))
    )
