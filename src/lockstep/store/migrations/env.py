"""Runs the revisions on the connection that the store hands over; the store owns the transaction."""

from __future__ import annotations

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    version_table="lockstep_version",
    # Our SQLite connections begin transactions themselves, so DDL rolls back there too.
    transactional_ddl=True,
)
context.run_migrations()
