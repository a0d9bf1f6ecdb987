"""A ring's record as text. Imports no package for terminals, so that the live view stays light."""

from __future__ import annotations

from typing import Any

from .call_path import Frame, user_frame
from .reader import (
    ASYNC,
    CAPTURED,
    ENCODED,
    INPUT_CHECKSUM,
    OUTPUT_CHECKSUM,
    P2P,
    RECEIVE,
    REPLAYED,
    Ring,
)


def arguments(ring: Ring, record: Any) -> str:
    """Returns element type, shape, reduction, and peer or root (ranks in the job): `float32[2x3] SUM`."""
    side = "in" if int(record["n_in"]) else "out"
    parts = []
    if int(record[f"n_{side}"]):
        n = int(record[f"n_{side}"])
        shape = "x".join(map(str, ring.shape(record, side))) or "1"
        name = ring.dtype(int(record[f"{side}_dtype"]))
        parts.append(f"{name}[{shape}]" + (f" x{n}" if n > 1 else ""))
    if ring.reduction(record):
        parts.append(ring.reduction(record))
    flags, peer, index = int(record["flags"]), int(record["peer"]), int(record["comm"])
    if index < len(ring.comms):
        peer = ring.comms[index].in_job(peer)
    if flags & P2P:
        parts.append(f"from {peer}" if flags & RECEIVE else f"to {peer}")
    elif peer >= 0:
        parts.append(f"root {peer}")
    if flags & REPLAYED:
        parts.append("in a graph's replay")
    elif flags & ASYNC:
        parts.append("async")
    if flags & CAPTURED:
        parts.append("captured by a graph")
    if flags & ENCODED:
        parts.append("in a wire format")
    return " ".join(parts)


def checksums(record: Any) -> tuple[str, str]:
    """Returns the checksums of what an operation read and wrote in hexadecimal; "" where it has none."""
    flags = int(record["flags"])
    return (
        f"{int(record['input_checksum']):016x}" if flags & INPUT_CHECKSUM else "",
        f"{int(record['output_checksum']):016x}" if flags & OUTPUT_CHECKSUM else "",
    )


def short_path(ring: Ring, record: Any) -> str:
    """Returns the call path, a line for each frame: the user's own, then what it called, then its callers."""
    path = ring.call_path(record)
    if not path:
        return "?"
    own = path.index(user_frame(path) or path[0])
    called = [f"> {_short(frame)}" for frame in reversed(path[:own])]
    return "\n".join([_short(path[own]), *called, *(f"< {_short(frame)}" for frame in path[own + 1 :])])


def _short(frame: Frame) -> str:
    text = f"{frame.file.rsplit('/', 1)[-1]}:{frame.line} {frame.function}"
    return f"{text} ({frame.library})" if frame.library else text


def short_place(ring: Ring, record: Any) -> str:
    """Returns the user's call site as file name and line: `train.py:41`; "?" if it is unknown."""
    frame = ring.frame(record)
    if frame is None:
        return "?"
    return f"{frame.file.rsplit('/', 1)[-1]}:{frame.line}"
