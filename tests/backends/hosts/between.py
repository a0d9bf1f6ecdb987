"""What carries `auto`'s messages between hosts on this machine."""

from unicomm.backends.ucx.library import why_not

BETWEEN = "gloo" if why_not() else "ucx"
