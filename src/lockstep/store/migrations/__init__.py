"""Alembic's revisions of the SQL store. One that was released never changes: a new one follows it."""
