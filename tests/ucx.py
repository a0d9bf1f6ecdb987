"""What carries messages between hosts here: UCX, if it is installed."""

from unicomm.backends.ucx.library import why_not

BETWEEN = "gloo" if why_not() else "ucx"
