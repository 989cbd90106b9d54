"""The tables of the SQL store. `migrations/` makes them; this is how the code of today sees them."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    text,
)

HEAD: Final = "0003"
"""The revision of the schema that this code reads and writes. A later one is a larger number."""

metadata: Final = MetaData()

version: Final = Table("lockstep_version", metadata, Column("version_num", Text, primary_key=True))

# What changes while a job runs. Counters are those of the current stage, kept up to date by each verb, so
# that reading a job or finishing a task never counts its tasks.
jobs: Final = Table(
    "lockstep_jobs",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("request_id", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("commit_id", Text, nullable=False),
    Column("plan_format", Integer, nullable=False),
    Column("scope", Text, nullable=False),
    Column("holds", Boolean, nullable=False),
    Column("stage", Text, nullable=False),
    Column("last_stage", Text, nullable=False),
    Column("tasks_total", BigInteger, nullable=False),
    Column("tasks_done", BigInteger, nullable=False),
    Column("rows_done", BigInteger, nullable=False),
    Column("bytes_done", BigInteger, nullable=False),
    Column("files", BigInteger, nullable=False),
    Column("attempts", BigInteger, nullable=False),
    Column("fingerprint", Text),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("started_at", Double),
    Column("finished_at", Double),
    Column("snapshot_id", BigInteger),
    Column("kill_requested", Boolean, nullable=False),
    Column("released", Boolean, nullable=False),
    Column("commit_epoch", BigInteger, nullable=False),
    Column("commit_owner", Text),
    Column("commit_free_at", Double, nullable=False),
    Column("commit_started_at", Double),
    Column("commit_attempts", BigInteger, nullable=False),
    Column("error", Text),
    Column("paced_at", Double),
    Column("paced_rows", BigInteger, nullable=False, server_default=text("0")),
    Index("lockstep_jobs_by_age", "created_at", "job_id"),
    Index(
        "lockstep_jobs_committing",
        "commit_free_at",
        sqlite_where=text("state = 'committing'"),
        postgresql_where=text("state = 'committing'"),
    ),
    Index(
        "lockstep_jobs_runnable",
        "created_at",
        "job_id",
        sqlite_where=text("state IN ('pending', 'running')"),
        postgresql_where=text("state IN ('pending', 'running')"),
    ),
    Index("lockstep_jobs_by_scope", "scope", "holds"),
    Index("lockstep_jobs_by_commit", "commit_id"),
)

# The frozen part apart from the moving one: a plan can be large, and a database rewrites whole rows.
plans: Final = Table(
    "lockstep_plans",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("plan", Text, nullable=False),
    Column("holding", Text, nullable=False),
    Column("beside", Text, nullable=False),
)

# `free_at` says when anybody may take a task: 0 for at once, later for one that waits for its next
# attempt, the end of the lease for a leased one, NULL for one that is done or failed. `saved_*` belong to
# the checkpoint.
tasks: Final = Table(
    "lockstep_tasks",
    metadata,
    Column("job_id", Text, nullable=False),
    Column("stage", Text, nullable=False),
    Column("idx", BigInteger, nullable=False),
    Column("descriptor", Text, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("attempts", BigInteger, nullable=False),
    Column("free_at", Double),
    Column("owner", Text),
    Column("started_at", Double),
    Column("position", Text),
    Column("rows_done", BigInteger, nullable=False),
    Column("bytes_done", BigInteger, nullable=False),
    Column("saved_rows", BigInteger, nullable=False),
    Column("saved_bytes", BigInteger, nullable=False),
    Column("saved_epoch", BigInteger, nullable=False),
    Column("saved_digest", Text),
    Column("files", BigInteger, nullable=False),
    Column("chunks", BigInteger, nullable=False),
    Column("error", Text),
    PrimaryKeyConstraint("job_id", "stage", "idx"),
    Index(
        "lockstep_tasks_open",
        "job_id",
        "stage",
        "free_at",
        "idx",
        sqlite_where=text("free_at IS NOT NULL"),
        postgresql_where=text("free_at IS NOT NULL"),
    ),
    Index(
        "lockstep_tasks_leased",
        "job_id",
        "free_at",
        "owner",
        sqlite_where=text("state = 'leased'"),
        postgresql_where=text("state = 'leased'"),
    ),
    Index(
        "lockstep_tasks_retrying",
        "job_id",
        sqlite_where=text("state = 'waiting' AND free_at > 0"),
        postgresql_where=text("state = 'waiting' AND free_at > 0"),
    ),
)

chunks: Final = Table(
    "lockstep_chunks",
    metadata,
    Column("job_id", Text, nullable=False),
    Column("stage", Text, nullable=False),
    Column("idx", BigInteger, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("files", LargeBinary, nullable=False),
    PrimaryKeyConstraint("job_id", "stage", "idx", "seq"),
)

# One row for each scope that was asked for: creators of jobs in one scope wait for each other on it.
scopes: Final = Table("lockstep_scopes", metadata, Column("scope", Text, primary_key=True))

history: Final = Table(
    "lockstep_history",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("job_id", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("event", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("detail", Text, nullable=False),
    Column("worker", Text),
    Index("lockstep_history_by_job", "job_id", "id"),
)

OF_A_JOB: Final = (plans, tasks, chunks, history, jobs)
"""All tables with rows of a job, in the order in which they are deleted."""
