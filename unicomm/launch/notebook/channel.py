"""Messages between a live worker and its parent over a socket pair, and functions in them."""

from __future__ import annotations

import contextlib
import functools
import io
import linecache
import os
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

from unicomm.comms.errors import InvalidArgumentError

_LENGTH = struct.Struct("<Q")
_SEND = 120  # seconds without progress of one message; only a stopped worker does not read at once
EXTRA = "pip install 'unicomm[notebook]'"

Source = dict[str, list[str]]  # the lines of code that is in no file, by its name in tracebacks


class Channel:
    """One end of a socket pair. Messages are tuples; several threads may send, one may receive."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, *message: Any) -> None:
        """Raises `OSError` when the other end is gone or does not read; the channel is then unusable."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(data)))
            self._socket.sendall(data)

    def receive(self) -> tuple[Any, ...] | None:
        """Returns the next message; None when the other end is gone."""
        try:
            head = self._read(_LENGTH.size)
            data = self._read(_LENGTH.unpack(head)[0])
        except (EOFError, ConnectionError):
            return None
        message: tuple[Any, ...] = pickle.loads(data)
        return message

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            if not (got := self._socket.recv_into(view)):
                raise EOFError
            view = view[got:]
        return data

    def close(self) -> None:
        self._socket.close()


def pair() -> tuple[socket.socket, socket.socket]:
    """Returns the parent's and the worker's end. The parent's has a timeout, for a worker that is stopped."""
    mine, theirs = socket.socketpair()
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND, 0))
    return mine, theirs


def _cloudpickler() -> Any:
    """Returns the class of pickler that takes functions of notebooks; None without cloudpickle."""
    try:
        import cloudpickle  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return None
    return _pickler_of(cloudpickle)


@functools.cache
def _pickler_of(cloudpickle: Any) -> Any:
    reducers = cloudpickle.CloudPickler.dispatch_table

    def reduce(code: CodeType) -> tuple[Any, ...]:
        return _code_in_file, (code.co_filename, *reducers[CodeType](code))

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc,name-defined,unused-ignore]
        dispatch_table = reducers.new_child({CodeType: reduce})

    return Pickler


def _code_in_file(file: str, make: Callable[..., CodeType], args: Sequence[Any]) -> CodeType:
    """Makes a code object that has its file's name: from 3.1.3 on, cloudpickle leaves it out.

    Tracebacks and the flight recorder show the user's line by this name.
    """
    return make(*args).replace(co_filename=file)


def _dumps(value: Any) -> bytes:
    pickler = _cloudpickler() or pickle.Pickler
    with io.BytesIO() as buffer:
        pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
        return buffer.getvalue()


def dump_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickles a call for `load`. Without cloudpickle, `fn` has to be a function of a module.

    Raises `InvalidArgumentError` for a call that cannot be sent.
    """
    if not callable(fn):
        raise InvalidArgumentError(f"{fn!r} cannot be called", hint="pass a function, and its arguments")
    name = getattr(fn, "__qualname__", repr(fn))
    cloudpickle = _cloudpickler() is not None
    if not cloudpickle and getattr(fn, "__module__", None) == "__main__":
        raise InvalidArgumentError(
            f"{name} is defined in a notebook or a script, where other processes cannot import it",
            hint=f"install cloudpickle ({EXTRA}), or move the function to a module",
        )
    try:
        return _dumps((fn, tuple(args), dict(kwargs)))
    except Exception as error:
        hint = "open files, locks and connections cannot be sent; create them inside the function"
        raise InvalidArgumentError(
            f"{name} and its arguments cannot be sent to other processes: {error}",
            hint=hint if cloudpickle else f"install cloudpickle ({EXTRA}); or: {hint}",
        ) from error


def dump(value: Any) -> bytes:
    """Pickles a result or an exception for `load`."""
    return _dumps(value)


load = pickle.loads  # cloudpickle's output is a pickle, too


def sources(known: set[str]) -> Source:
    """Returns the code that is in no file, such as a notebook's cells, except for names in `known`.

    Adds its names to `known`. A worker needs this code to show its lines in tracebacks.
    """
    found: Source = {}
    for name, entry in list(linecache.cache.items()):
        if name not in known and len(entry) == 4 and not os.path.exists(name):
            known.add(name)
            found[name] = list(entry[2])
    return found


def learn(source: Source) -> None:
    """Makes the code that `sources` returned in another process known to tracebacks here."""
    for name, lines in source.items():
        with contextlib.suppress(TypeError):
            # Without a modification time, traceback keeps the entry instead of looking for a file.
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
