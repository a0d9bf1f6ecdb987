"""The smallest input that breaks a promise in the same way."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from .limits import limited
from .targets import Room, Target, signature

_SECONDS = 20.0  # of processor time that one input may take
_ADDRESSES = 3 << 30  # bytes of addresses beyond those at the start


def outcome(target: Target, room: Room, data: bytes, every: bool = True) -> str:
    """Reads an input in a process of its own. Returns how it broke a promise, "" if it kept all."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            os.write(write, _inside(target, room, data, every).encode("utf-8", "replace")[:4000])
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read().decode("utf-8", "replace")
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return "it does not end" if number == signal.SIGPROF else f"killed by {signal.Signals(number).name}"
    return said


def _inside(target: Target, room: Room, data: bytes, every: bool) -> str:
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)  # its signal ends the process
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    faulthandler.disable()  # pytest's writes to a copy of stderr
    with open("/proc/self/statm") as file:
        most = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + _ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        with limited():
            target(room, data, every)
    except Exception as error:
        return signature(error)
    return ""


def minimise(target: Target, room: Room, data: bytes, seconds: float = 60.0) -> tuple[bytes, str]:
    """Returns the smallest input that breaks the same promise, and which it is.

    `seconds`: of the processor's time, after which it is the smallest one so far.
    """
    every = bool(what := outcome(target, room, data))
    what = what or outcome(target, room, data, every=False)
    until = time.process_time() + seconds

    def same(made: bytes) -> bool:
        return len(made) > 0 and outcome(target, room, made, every) == what

    while what:
        before = data
        for candidates in (_trees, _pieces):
            data = _smaller(data, candidates, same, until)
        if data == before or time.process_time() > until:
            break
    return data, what


def _smaller(
    data: bytes,
    candidates: Callable[[bytes, int], Iterator[bytes]],
    same: Callable[[bytes], bool],
    until: float,
) -> bytes:
    """Takes the first smaller candidate that is the same, and goes on there until none is left."""
    at = 0
    while True:
        for place, made in enumerate(candidates(data, at), at):
            if time.process_time() > until:
                return data
            if len(made) < len(data) and same(made):
                data, at = made, place
                break
        else:
            return data


def _trees(data: bytes, begin: int) -> Iterator[bytes]:
    """A JSON text without one of its values, for each value from number `begin` on; the outer ones first."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return
    todo: list[Any] = [tree]
    number = 0
    while todo:
        one = todo.pop(0)
        keys: list[Any] = (
            list(range(len(one))) if isinstance(one, list) else list(one) if isinstance(one, dict) else []
        )
        for key in keys:
            if number >= begin:
                kept = one[key]
                shorter = one[:key] + one[key + 1 :] if isinstance(one, list) else None
                if shorter is None:
                    items = list(one.items())
                    del one[key]
                    yield json.dumps(tree).encode()
                    one.clear()
                    one.update(items)
                else:
                    whole = list(one)
                    one[:] = shorter
                    yield json.dumps(tree).encode()
                    one[:] = whole
                assert one[key] is kept
            number += 1
            todo.append(one[key])


def _pieces(data: bytes, begin: int) -> Iterator[bytes]:
    """The input without one of its pieces: halves, quarters, down to bytes. `begin` is not used."""
    size = len(data) // 2
    while size:
        for at in range(0, len(data), size):
            yield data[:at] + data[at + size :]
        size //= 2
