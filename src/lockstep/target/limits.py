"""Catalogs with a limit on the time that a request takes, and what became of a request in a few words.

Without a limit a server that hangs would hold a planner, or the only committer of a table, for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode

from pyiceberg.catalog import PY_CATALOG_IMPL, TYPE, URI
from pyiceberg.catalog.rest import RestCatalog
from requests import ConnectionError as NoConnection
from requests import PreparedRequest, RequestException, Response, Session, Timeout

CONNECT_TIMEOUT: Final = "rest.connect-timeout"
REQUEST_TIMEOUT: Final = "rest.request-timeout"
"""Properties of a REST catalog, in seconds: until it takes a connection, and while it says nothing."""
CONNECT_TIMEOUT_S: Final = 5.0
REQUEST_TIMEOUT_S: Final = 30.0
# libpq's own settings: to connect, for data that is not acknowledged, and for one statement.
POSTGRESQL: Final = {
    "connect_timeout": f"{CONNECT_TIMEOUT_S:.0f}",
    "tcp_user_timeout": f"{REQUEST_TIMEOUT_S * 1000:.0f}",
    "options": f"-cstatement_timeout={REQUEST_TIMEOUT_S * 1000:.0f}",
}


def with_timeouts(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The properties of a catalog; one that speaks REST, or lies in PostgreSQL, gets the limits."""
    found = dict(properties)
    uri = str(found.get(URI, ""))
    kind = str(found.get(TYPE, "rest" if uri.startswith("http") else "")).lower()
    if kind == "rest" and PY_CATALOG_IMPL not in found:
        found.pop(TYPE, None)
        found[PY_CATALOG_IMPL] = f"{TimedRestCatalog.__module__}.{TimedRestCatalog.__name__}"
    if uri.startswith("postgresql"):
        missing = {name: value for name, value in POSTGRESQL.items() if f"{name}=" not in uri}
        found[URI] = f"{uri}{'&' if '?' in uri else '?'}{urlencode(missing)}"
    return found


class TimedRestCatalog(RestCatalog):
    def _create_session(self) -> Session:
        session = super()._create_session()
        limits = (
            float(self.properties.get(CONNECT_TIMEOUT, CONNECT_TIMEOUT_S)),
            float(self.properties.get(REQUEST_TIMEOUT, REQUEST_TIMEOUT_S)),
        )
        send = session.send

        def send_in_time(request: PreparedRequest, **options: Any) -> Response:
            return send(request, **{**options, "timeout": options.get("timeout") or limits})

        session.send = send_in_time  # type: ignore[method-assign]
        return session


def why(error: BaseException) -> str:
    """The reason of an error, in one line that a person can read."""
    if isinstance(error, RequestException):
        return _why_no_answer(error)
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _why_no_answer(error: RequestException) -> str:
    url = str(error.request.url).partition("?")[0] if error.request else "the server"
    if isinstance(error, Timeout):
        return f"no answer from {url} in time"
    if isinstance(error, NoConnection):
        causes = [error, *_causes(error)]
        system = next(
            (e.strerror for e in causes if isinstance(e, OSError) and e.strerror), "connection lost"
        )
        return f"{url} cannot be reached ({system.lower()})"
    return f"{url}: {type(error).__name__}: {error}"


def _causes(error: BaseException) -> list[BaseException]:
    """What lies behind an error: requests and urllib3 hand it on as an argument or as `reason`."""
    found: list[BaseException] = []
    queue: list[Any] = [error]
    while queue:
        one = queue.pop(0)
        behind = [one.__cause__, one.__context__, getattr(one, "reason", None), *getattr(one, "args", ())]
        for other in behind:
            if isinstance(other, BaseException) and other not in found:
                found.append(other)
                queue.append(other)
    return found
