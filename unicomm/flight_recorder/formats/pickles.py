"""Reads the pickles of torch's flight recorder as plain data. Nothing in a pickle is run."""

from __future__ import annotations

import sys
from pathlib import Path

from .dump_columns import DumpColumns, DumpError


def read(source: Path | str | bytes, most: int = sys.maxsize) -> DumpColumns:
    """Reads one dump, which may need `most` bytes of memory beside its own.

    The native core parses it without the interpreter's lock, so that threads can read several files in
    parallel. It accepts plain data only: dicts, lists, tuples, numbers, texts, bytes, None and booleans. A
    missing key, or one with a value of another type, counts as 0, False, "" or ().

    Raises `DumpError` for bytes that are not a dump, `OSError` when the file cannot be read, `MemoryError`
    when the dump needs more than `most`. An opcode that would import or call something is a `DumpError`,
    which names the opcode and its position.
    """
    from unicomm import _core  # imported here, so that rings and JSON can be read without the native core

    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    try:
        return DumpColumns(**_core.read_dump(data, max(0, most)))
    except ValueError as error:
        raise DumpError(str(error)) from None
