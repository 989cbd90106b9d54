"""The first schema.

Revision ID: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "lockstep_jobs",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("commit_id", sa.Text, nullable=False),
        sa.Column("plan_format", sa.Integer, nullable=False),
        sa.Column("scope", sa.Text, nullable=False),
        sa.Column("holds", sa.Boolean, nullable=False),
        sa.Column("stage", sa.Text, nullable=False),
        sa.Column("last_stage", sa.Text, nullable=False),
        sa.Column("tasks_total", sa.BigInteger, nullable=False),
        sa.Column("tasks_done", sa.BigInteger, nullable=False),
        sa.Column("rows_done", sa.BigInteger, nullable=False),
        sa.Column("bytes_done", sa.BigInteger, nullable=False),
        sa.Column("files", sa.BigInteger, nullable=False),
        sa.Column("attempts", sa.BigInteger, nullable=False),
        sa.Column("fingerprint", sa.Text),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.Column("started_at", sa.Double),
        sa.Column("finished_at", sa.Double),
        sa.Column("snapshot_id", sa.BigInteger),
        sa.Column("kill_requested", sa.Boolean, nullable=False),
        sa.Column("released", sa.Boolean, nullable=False),
        sa.Column("commit_epoch", sa.BigInteger, nullable=False),
        sa.Column("commit_owner", sa.Text),
        sa.Column("commit_free_at", sa.Double, nullable=False),
        sa.Column("commit_started_at", sa.Double),
        sa.Column("commit_attempts", sa.BigInteger, nullable=False),
        sa.Column("error", sa.Text),
    )
    op.create_index("lockstep_jobs_by_age", "lockstep_jobs", ["created_at", "job_id"])
    committing = sa.text("state = 'committing'")
    op.create_index(
        "lockstep_jobs_committing",
        "lockstep_jobs",
        ["commit_free_at"],
        sqlite_where=committing,
        postgresql_where=committing,
    )
    runnable = sa.text("state IN ('pending', 'running')")
    op.create_index(
        "lockstep_jobs_runnable",
        "lockstep_jobs",
        ["created_at", "job_id"],
        sqlite_where=runnable,
        postgresql_where=runnable,
    )
    op.create_index("lockstep_jobs_by_scope", "lockstep_jobs", ["scope", "holds"])
    op.create_index("lockstep_jobs_by_commit", "lockstep_jobs", ["commit_id"])
    op.create_table(
        "lockstep_plans",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("plan", sa.Text, nullable=False),
        sa.Column("holding", sa.Text, nullable=False),
        sa.Column("beside", sa.Text, nullable=False),
    )
    op.create_table(
        "lockstep_tasks",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("stage", sa.Text, nullable=False),
        sa.Column("idx", sa.BigInteger, nullable=False),
        sa.Column("descriptor", sa.Text, nullable=False),
        sa.Column("rows", sa.BigInteger, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("attempts", sa.BigInteger, nullable=False),
        sa.Column("free_at", sa.Double),
        sa.Column("owner", sa.Text),
        sa.Column("started_at", sa.Double),
        sa.Column("position", sa.Text),
        sa.Column("rows_done", sa.BigInteger, nullable=False),
        sa.Column("bytes_done", sa.BigInteger, nullable=False),
        sa.Column("saved_rows", sa.BigInteger, nullable=False),
        sa.Column("saved_bytes", sa.BigInteger, nullable=False),
        sa.Column("saved_epoch", sa.BigInteger, nullable=False),
        sa.Column("saved_digest", sa.Text),
        sa.Column("files", sa.BigInteger, nullable=False),
        sa.Column("chunks", sa.BigInteger, nullable=False),
        sa.Column("error", sa.Text),
        sa.PrimaryKeyConstraint("job_id", "stage", "idx"),
    )
    op.create_index("lockstep_tasks_free", "lockstep_tasks", ["job_id", "stage", "free_at", "idx"])
    leased = sa.text("state = 'leased'")
    op.create_index(
        "lockstep_tasks_leased",
        "lockstep_tasks",
        ["job_id", "free_at", "owner"],
        sqlite_where=leased,
        postgresql_where=leased,
    )
    retrying = sa.text("state = 'waiting' AND free_at > 0")
    op.create_index(
        "lockstep_tasks_retrying",
        "lockstep_tasks",
        ["job_id"],
        sqlite_where=retrying,
        postgresql_where=retrying,
    )
    op.create_table(
        "lockstep_chunks",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("stage", sa.Text, nullable=False),
        sa.Column("idx", sa.BigInteger, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("files", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "stage", "idx", "seq"),
    )
    op.create_table("lockstep_scopes", sa.Column("scope", sa.Text, primary_key=True))
    op.create_table(
        "lockstep_history",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer, "sqlite"),
            primary_key=True,
            autoincrement=True,
        ),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("event", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("worker", sa.Text),
    )
    op.create_index("lockstep_history_by_job", "lockstep_history", ["job_id", "id"])
