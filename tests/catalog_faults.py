"""A real HTTP server before a REST catalog that spoils commits, before or after they took effect."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

HANG_S: Final = 7.0
FAULTS: Final = tuple(
    f"{what} {when} it was applied"
    for what in ("500", "503", "409", "hang", "cut")
    for when in ("before", "after")
)


class CatalogFaults:
    """Forwards everything. The first commit of each snapshot meets the next fault; sent again it passes."""

    def __init__(self, upstream_port: int, faults: Sequence[str] = FAULTS) -> None:
        self.left = list(faults)
        self._seen: set[int] = set()
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                """Nobody reads it."""

            def _pass(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fault = outer.fault_for(self.command, body)
                if "before" in fault:
                    self._spoil(fault)
                    return
                upstream = http.client.HTTPConnection("127.0.0.1", upstream_port, timeout=60)
                kept = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "accept-encoding")}
                upstream.request(self.command, self.path, body, kept)
                answer = upstream.getresponse()
                said = answer.read()
                upstream.close()
                if fault:
                    self._spoil(fault)
                else:
                    self._say(answer.status, said)

            def _spoil(self, fault: str) -> None:
                if fault.startswith("hang"):
                    time.sleep(HANG_S)
                if fault.startswith(("hang", "cut")):
                    self.close_connection = True
                    return
                status = int(fault[:3])
                error = {"message": "as drilled", "type": "Drill", "code": status}
                self._say(status, json.dumps({"error": error}).encode())

            def _say(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_POST = do_HEAD = do_DELETE = _pass  # noqa: N815 - the names that the base class calls

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def fault_for(self, verb: str, body: bytes) -> str:
        added = _snapshots_added(body) if verb == "POST" else []
        with self._lock:
            if not added or added[0] in self._seen or not self.left:
                return ""
            self._seen.add(added[0])
            return self.left.pop(0)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _snapshots_added(body: bytes) -> list[int]:
    updates = json.loads(body or b"{}").get("updates", [])
    return [update["snapshot"]["snapshot-id"] for update in updates if update.get("action") == "add-snapshot"]
