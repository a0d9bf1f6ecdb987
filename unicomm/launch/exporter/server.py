"""The exporter's process, which runs beside the launcher of each host.

    python -m unicomm.launch.exporter.server DESCRIPTOR    # a listening socket

`unicomm run --metrics-port` starts it, and writes commands to its stdin: a line of JSON for each start of the
ranks. A job runs on without it, or when it is stopped or killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from unicomm.flight_recorder.metrics.openmetrics import registry
from unicomm.launch.side_process import live_with_the_launcher

from .followed_rings import FollowedRings

_MOST_AT_ONCE = 16  # connections
_PATIENCE = 10.0  # seconds that a client may take for each step of its request
_NICE = 10  # ranks come first
_PATHS = ("/", "/metrics")

Application = Callable[[dict[str, Any], Any], Iterable[bytes]]


class _Handler(WSGIRequestHandler):
    timeout = _PATIENCE

    def log_message(self, format: str, *args: Any) -> None:
        """Logs no requests."""


class _Server(ThreadingWSGIServer):
    """Serves at a socket that listens already, a bounded number of clients at once."""

    daemon_threads = True

    def __init__(self, listening: socket.socket, application: Application) -> None:
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_name, self.server_port = listening.getsockname()[:2]
        self.setup_environ()
        self.set_app(application)
        self._room = threading.BoundedSemaphore(_MOST_AT_ONCE)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are no error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _application(rings: FollowedRings) -> Application:
    metrics = make_wsgi_app(registry(rings.samples))

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ.get("PATH_INFO") not in _PATHS:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"metrics are at /metrics\n"]
        found: Iterable[bytes] = metrics(environ, start_response)
        return found

    return answer


def main() -> None:
    live_with_the_launcher()
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    rings = FollowedRings()
    server = _Server(socket.socket(fileno=int(sys.argv[1])), _application(rings))
    for work in (server.serve_forever, rings.keep_up):
        threading.Thread(target=work, daemon=True).start()
    for line in sys.stdin:
        rings.follow(Path(json.loads(line)["rings"]))
    sys.stderr.flush()
    os._exit(0)  # with requests that are under way: the launcher has ended


if __name__ == "__main__":
    main()
