"""The operation log, `clog`: one line of text for each step of each operation, cheap to write and to grep.

    V|1|base_timestamp=<seconds since the epoch>
    new_comm|comm=main|rank=0|world_size=2|backend=shm|uid=...
    C1|sig|all_reduce|in_count=4|dtype=float32|red_op=sum|async_op=f|comm=main
    C1|Q|op_id=7|seq=3|+0.000105        queued: the call has begun
    C1|E|op_id=7|seq=3|+0.000131        ended
    C1|X|op_id=8|seq=4|+2.000871|CommTimeoutError   ended with an error

A signature is written once and then stands for all operations like it. Times are seconds since the base.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence, Set
from pathlib import Path
from typing import TextIO

from unicomm.comms.errors import InvalidArgumentError
from unicomm.comms.operations.call import OpArgs
from unicomm.comms.operations.table import OpName

from .hooks import Hookable, RemovableHandle

_VERSION = 1
_EVENTS = {"Q", "S", "E", "W", "ALL", "LIFECYCLE", "NONE"}
_ENDS = {"E", "ALL", "LIFECYCLE"}


def _known(what: str, names: Sequence[str], known: Set[str]) -> set[str]:
    asked = {names} if isinstance(names, str) else set(names)
    if unknown := sorted(asked - known):
        raise InvalidArgumentError(f"{what}: {unknown[0]!r} is unknown", hint=", ".join(sorted(known)))
    return asked


class clog:
    """Writes the operations of the communicators that it is registered with.

    Args:
        output: a path (appended to), an open text file, or None for stderr.
        events: which steps to write. The beginning (Q) always is, the end (E or X) with "E", "LIFECYCLE" or
            "ALL". "S" and "W" are accepted and stand for no line. "NONE" adds nothing.
        verbose: "buffers" adds the addresses of the tensors to the signatures.

    Raises `InvalidArgumentError` for other names.
    """

    def __init__(
        self,
        output: str | Path | TextIO | None = None,
        events: Sequence[str] = ("ALL",),
        verbose: Sequence[str] = (),
    ) -> None:
        self._ends = bool(_ENDS & _known("events", events, _EVENTS))
        self._buffers = "buffers" in _known("verbose", verbose, {"buffers"})
        self._own = isinstance(output, (str, Path))
        if isinstance(output, (str, Path)):
            self._file: TextIO = open(output, "a", encoding="utf-8")  # noqa: SIM115
        else:
            self._file = output or sys.stderr
        self._base = time.time()
        self._mono = time.monotonic()
        self._lock = threading.Lock()
        self._signatures: dict[str, int] = {}
        # By uid and rank: ranks that are threads of one process may share this object.
        self._handles: dict[tuple[str, int], list[RemovableHandle]] = {}
        self._write(f"V|{_VERSION}|base_timestamp={self._base:.6f}")

    def register_with_comm(self, comm: Hookable) -> None:
        """Logs `comm` from now on. Raises `InvalidArgumentError` if `comm` is registered already."""
        uid, name = comm.get_uid(), comm.get_name()
        key = (uid, comm.get_rank())
        if key in self._handles:
            raise InvalidArgumentError(
                "already registered with this clog", comm=name, hint="register each communicator once"
            )
        self._write(
            f"new_comm|comm={name}|rank={comm.get_rank()}|world_size={comm.get_size()}"
            f"|backend={comm.get_backend()}|uid={uid}"
        )

        def before(op: OpName, op_id: int, args: OpArgs) -> None:
            code = self._signature(name, args)
            self._write(f"C{code}|Q|op_id={op_id}|seq={args.seq}|+{self._now():.6f}")

        def over(args: OpArgs, error: BaseException | None) -> None:
            code = self._signature(name, args)
            end = f"|{type(error).__name__}" if error else ""
            if args.wire is not None:
                end = f"|wire_bytes={args.wire.sent}{end}"
            kind = "X" if error else "E"
            self._write(f"C{code}|{kind}|op_id={args.op_id}|seq={args.seq}|+{self._now():.6f}{end}")

        hooks = comm._engine.hooks
        self._handles[key] = [hooks.add("pre", before)]
        if self._ends:
            self._handles[key].append(hooks.add("over", over))

    def flush(self) -> None:
        """Hands all lines to the operating system, which has them already: each line is flushed."""
        self._file.flush()

    def close(self) -> None:
        """Stops logging and closes the file if this object opened it."""
        for handle in [h for handles in self._handles.values() for h in handles]:
            handle.remove()
        self._handles.clear()
        if self._own:
            self._file.close()

    def _now(self) -> float:
        return time.monotonic() - self._mono

    def _signature(self, comm: str, args: OpArgs) -> int:
        fields = [args.name]
        tensors = [*args.inputs] or [*args.outputs]
        if args.messages and args.name == "batch":
            fields.append(f"num_ops={len(args.messages)}")
        if tensors:
            fields.append(f"in_count={sum(t.numel() for t in args.inputs)}")
            fields.append(f"dtype={str(tensors[0].dtype).removeprefix('torch.')}")
        if self._buffers:
            for kind, each in (("in", args.inputs), ("out", args.outputs)):
                if each:
                    fields.append(f"{kind}_ptr={','.join(f'{t.data_ptr():#x}' for t in each)}")
        if args.op is not None:
            fields.append(f"red_op={args.op.name.lower()}")
        if args.wire is not None:
            fields.append(f"wire={args.wire.format.text}")
        if args.root >= 0:
            fields.append(f"root={args.root}")
        if args.peer >= 0:
            fields.append(f"peer={args.peer}")
        fields.append(f"async_op={'t' if args.async_op else 'f'}")
        fields.append(f"comm={comm}")
        text = "|".join(fields)
        with self._lock:
            code = self._signatures.get(text)
            if code is None:
                code = self._signatures[text] = len(self._signatures) + 1
                self._file.write(f"C{code}|sig|{text}\n")
        return code

    def _write(self, line: str) -> None:
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()
