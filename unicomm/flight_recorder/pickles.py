"""Reading the pickles of torch's flight recorder as plain data: nothing in them is ever run."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, NoReturn

from .columns import Columns, DumpError, from_dump


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise DumpError(f"the pickle asks for {module}.{name}, but a dump is plain data: it is not trusted")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise DumpError("the pickle refers to objects outside of it: it is not trusted")


def read(source: Path | str | bytes) -> Columns:
    """One dump. Raises `DumpError` for bytes that are none, `OSError` for files that cannot be read."""
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    try:
        dump = _PlainUnpickler(io.BytesIO(data)).load()
    except DumpError:
        raise
    except EOFError:
        raise DumpError(f"the pickle ends too early, after {len(data)} bytes: it was cut off") from None
    except (pickle.UnpicklingError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise DumpError(f"the pickle is broken: {error}") from None
    except (OverflowError, MemoryError, RecursionError, UnicodeError) as error:
        raise DumpError(f"the pickle is broken: {type(error).__name__}") from None
    return from_dump(dump)
