"""The exporter as the launcher sees it."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from unicomm.launch.side_process import SideProcess

LOOPBACK = "127.0.0.1"
_BACKLOG = 64


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens there; port 0 is any free one. Raises `OSError`.

    The launcher opens it, so that a port that is taken is known before there are ranks.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


class ExporterProcess(SideProcess):
    """An exporter's process, used by one thread."""

    def __init__(self, log: Path, listening: socket.socket) -> None:
        """Starts the process, and gives it the socket. Raises `OSError`."""
        host, port = listening.getsockname()[:2]
        with listening:  # ranks that are forked from the launcher do not inherit it
            descriptor = listening.fileno()
            super().__init__("unicomm.launch.exporter.server", log, str(descriptor), keep=(descriptor,))
        where = f"[{host}]" if ":" in host else host
        print(
            f"unicomm: metrics of the ranks of this host: http://{where}:{port}/metrics",
            file=sys.stderr,
            flush=True,
        )

    def follow(self, rings: Path) -> None:
        """Tells the folder to which the ranks write that are about to be started."""
        self.tell("follow", rings=str(rings))
