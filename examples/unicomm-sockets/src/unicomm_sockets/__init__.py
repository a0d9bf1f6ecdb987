"""A backend for unicomm over plain TCP sockets.

backend.py  SocketsBackend, which the entry point in pyproject.toml names
meeting.py  connects each rank with each other one
"""

from .backend import SocketsBackend

__all__ = ["SocketsBackend"]
