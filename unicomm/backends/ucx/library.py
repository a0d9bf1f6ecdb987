"""libucp, the library of UCX: where it is looked for, and the one opened copy of this process."""

from __future__ import annotations

import threading

from unicomm import _core
from unicomm.backends.vendor.library_search import VendorLibrary
from unicomm.comms.errors import UnsupportedError

UCX = VendorLibrary(
    "ucx",
    "UCX",
    ("libucp.so.0", "libucp.so"),
    (("libucx", "lib/libucp.so.0"), ("libucx", "lib/libucp.so")),
    "`pip install 'unicomm[ucx]'` installs it; or install your distribution's libucx0; the hint 'library'"
    " names another file",
)

_opened: list[_core.UcxLibrary] = []
_lock = threading.Lock()


def open_library(path: str = "") -> _core.UcxLibrary:
    """Returns the copy of libucp that this process uses.

    That is the copy that the process has loaded, else `path`, else that of the package libucx, else the
    system's; the first one opened stays. Raises `UnsupportedError` if there is none.
    """
    with _lock:
        if not _opened:
            _opened.append(UCX.find(_core.UcxLibrary, path))
        return _opened[0]


def why_not(path: str = "") -> str:
    """Returns why this process has no UCX, "" if it has."""
    try:
        open_library(path)
    except UnsupportedError as error:
        return error.message
    return ""


def version_text(library: _core.UcxLibrary) -> str:
    return ".".join(map(str, library.version))
