"""The memory and the time of a call, and what output may contain."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

MOST_MEMORY = 256 << 20  # bytes that a call may need beyond what the process had before
MOST_SECONDS = 10.0  # of processor time
# What a terminal acts upon instead of showing it, and halves of characters. Lines may end.
_CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028\u2029\u2066-\u2069\ud800-\udfff]")
# How numpy and our readers say that the limit of the process's memory was met.
_NO_MEMORY = re.compile(r"Unable to allocate|not enough memory|MemoryError")


class BrokenPromiseError(AssertionError):
    """A reader did not keep a promise: it took too much, or printed what it should not."""


@contextmanager
def limited() -> Iterator[None]:
    """Raises `BrokenPromiseError` when the block needs too much memory or processor time."""
    grown, began = measured_memory(), time.process_time()
    yield
    seconds = time.process_time() - began
    if seconds > MOST_SECONDS:
        raise BrokenPromiseError("it took too much processor time")
    if grown() > MOST_MEMORY:
        raise BrokenPromiseError("it took too much memory")


def measured_memory() -> Callable[[], int]:
    """Returns a function that returns by how many bytes the memory of this process has grown at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is used now
    before = _memory("VmRSS")
    return lambda: _memory("VmHWM") - before


def _memory(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) << 10
    raise AssertionError(f"the kernel does not tell {what}")


def check_text(text: str) -> None:
    """Raises `BrokenPromiseError` for text that does more to a terminal than being shown."""
    if found := _CONTROL.search(text):
        raise BrokenPromiseError(f"the output has {found[0]!r}")
    if found := _NO_MEMORY.search(text):
        raise BrokenPromiseError("it asked for more memory than there is")


def strict_json(text: str) -> Any:
    """Returns the value of a JSON text. Raises `BrokenPromiseError` for one that other readers refuse."""

    def refuse(word: str) -> NoReturn:
        raise BrokenPromiseError(f"the JSON has {word}")

    try:
        value = json.loads(text, parse_constant=refuse)
    except ValueError as error:
        raise BrokenPromiseError("the output is no JSON") from error
    _check_texts(value)
    return value


def _check_texts(value: Any) -> None:
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, str):
            check_text(one)
        elif isinstance(one, list):
            todo += one
        elif isinstance(one, dict):
            todo += [*one.keys(), *one.values()]
