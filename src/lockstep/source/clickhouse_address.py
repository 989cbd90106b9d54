"""The address of a ClickHouse table: a server over HTTP, or an embedded data folder."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from lockstep.errors import Invalid

_ADDRESS: Final = re.compile(
    r"(?P<scheme>clickhouses?)://(?:(?P<user>[^:@/]*)(?::(?P<password>.*))?@)?"
    r"(?P<host>\[[^\]]+\]|[^:/@\[\]]+)(?::(?P<port>\d+))?/(?P<database>[^/]+)/(?P<table>[^/]+)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Endpoint:
    """Where a ClickHouse server listens, and as whom it is asked."""

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    secure: bool = False

    @property
    def label(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Place:
    """Where a table is: an endpoint or a data folder, a database and a table."""

    scheme: str
    database: str
    table: str
    folder: Path | None = None
    endpoint: Endpoint | None = None

    @property
    def identity(self) -> str:
        """The source without user and password."""
        if self.folder is not None:
            return f"chdb:{self.folder}/{quote(self.database, safe='')}/{quote(self.table, safe='')}"
        if self.endpoint is None:
            raise Invalid("an address needs a host or a folder")
        where = f"{quote(self.database, safe='')}/{quote(self.table, safe='')}"
        return f"{self.scheme}://{self.endpoint.label}/{where}"


def split_chdb(address: str) -> tuple[str, str, str]:
    """Folder, database and table of `chdb:PATH/db/table`, as they are written. Raises: Invalid."""
    path, _, table = address.removeprefix("chdb:").rstrip("/").rpartition("/")
    folder, _, database = path.rpartition("/")
    if not (folder and database and table):
        raise Invalid(f'"{address}" is not chdb:PATH/db/table', hint="example: chdb:./data/shop/events")
    return folder, database, table


def parse_address(address: str, root: Path) -> Place:
    """Read `clickhouse://user:password@host:port/db/table` or `chdb:PATH/db/table`, percent-decoded.

    Raises: Invalid; the message never holds the password.
    """
    if address.startswith("chdb:"):
        folder, database, table = split_chdb(address)
        return Place("chdb", unquote(database), unquote(table), folder=(root / unquote(folder)).resolve())
    match = _ADDRESS.fullmatch(address.rstrip("/"))
    if match is None:
        raise Invalid(
            "the source is not clickhouse://user:password@host:port/db/table",
            hint="percent-encode special characters; ${NAME} keeps a password out of the address",
        )
    secure = match["scheme"] == "clickhouses"
    endpoint = Endpoint(
        match["host"].strip("[]"),
        int(match["port"] or (8443 if secure else 8123)),
        unquote(match["user"] or "default"),
        unquote(match["password"] or ""),
        secure,
    )
    return Place(match["scheme"], unquote(match["database"]), unquote(match["table"]), endpoint=endpoint)
