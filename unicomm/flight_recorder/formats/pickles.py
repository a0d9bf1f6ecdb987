"""Reading the pickles of torch's flight recorder as plain data: nothing in them is ever run."""

from __future__ import annotations

from pathlib import Path

from .dump_columns import DumpColumns, DumpError


def read(source: Path | str | bytes) -> DumpColumns:
    """One dump. Raises `DumpError` for bytes that are none, `OSError` for files that cannot be read.

    The native core parses without the interpreter's lock, so several files can be read side by side in
    threads. Only plain data is read: dicts, lists, tuples, numbers, texts, bytes, None, true and false. Any
    opcode that would import or call something is refused, and named with its place. Keys that are missing, or
    hold another type than they should, count as 0, False, "" or ().
    """
    from unicomm import _core  # only pickles need it: rings and JSON are read where the core cannot be loaded

    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    try:
        return DumpColumns(**_core.read_dump(data))
    except (ValueError, MemoryError) as error:
        raise DumpError(str(error) or "no memory for the dump") from None
