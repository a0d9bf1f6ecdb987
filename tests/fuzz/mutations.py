"""Inputs changed with their format in mind, where changed bytes alone would be refused at once.

A mutation takes an input and a random generator, and returns another input. One that it cannot read is
returned as it is: the fuzzer then changes its bytes.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import math
import pickle
import pickletools
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

import msgspec
import numpy as np

from unicomm.flight_recorder.ring.reader import COMM, FRAME, HEADER, MAGIC, RECORD

Mutation = Callable[[bytes, Random], bytes]

NUMBERS = [
    *(0, 1, -1, 2, 3, 7, 255, 256, 1 << 15, 1 << 16, (1 << 18) - 1, 1 << 18, 1 << 24, 1 << 31, (1 << 31) - 1),
    *(1 << 32, 1 << 53, (1 << 62), (1 << 63) - 1, 1 << 63, -(1 << 63), (1 << 64) - 1, 1 << 64, -(1 << 31)),
]
TEXTS = [
    *(
        "",
        "0",
        "-1",
        "--5",
        "0-3",
        "0-4194302",
        "1,1",
        "3,2,1",
        "[0, 1]",
        "[0,",
        "0-9:3",
        "\u00b2",
        "send",
        "recv",
    ),
    *(
        "nccl:send 0->1",
        "gloo:recv 1<-0",
        "all_reduce",
        "coalesced",
        "nccl:coalesced",
        "completed",
        "scheduled",
    ),
    *(
        "\x1b[2J\x07",
        "\ud800",
        "\u202eabc",
        "[red]x[/no]",
        "|`<b>`|",
        "%1b%5b2J",
        "%ed%a0%80",
        "a" * 300,
        "9" * 25,
    ),
    *(
        "Infinity",
        "1e400",
        "nccl:_broadcast_oop",
        "nccl:ALLGATHER_coalesced",
        "replay",
        "float32",
        "Float",
        "\n# x",
    ),
]
ODD: list[Any] = [*NUMBERS, *TEXTS, 10**400, -(10**400), math.inf, -math.inf, math.nan, 1e308, 5e-324, 0.5]
# What json.dumps does not write: each stands for itself in quotes, which are removed afterwards.
RAW = {
    "@deep": "[" * 3000 + "]" * 3000,
    "@keys": '{"a":' * 3000 + "1" + "}" * 3000,
    "@large": "1e999999999",
    "@long": "9" * 5000,
    "@small": "1e-999999999",
    "@minus": "-0.0",
    "@half": '"\\ud800"',
}
ODD += [*RAW, *RAW, True, False, None, [], {}, [[[]]], [[0, 1]], [0, 1], [None], {"a": {}}, [10**400] * 3]


# --- trees: JSON, pickles, MessagePack ------------------------------------------------------------------


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Returns (container, key) of all values in a tree of lists and dictionaries."""
    found: list[tuple[Any, Any]] = []
    todo = [tree]
    while todo and len(found) < 20_000:
        one = todo.pop()
        keys = range(len(one)) if isinstance(one, list) else list(one) if isinstance(one, dict) else ()
        for key in keys:
            found.append((one, key))
            todo.append(one[key])
    return found


def _near(value: Any, rng: Random) -> Any:
    """Returns a value of the same type as `value`, or an odd one."""
    if isinstance(value, bool) or value is None or rng.random() < 0.3:
        return deepcopy(rng.choice(ODD))  # else it may become a part of itself
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, -value, value * 2, value * 1000, rng.choice(NUMBERS)])
    if isinstance(value, float):
        return rng.choice([-value, value * 1e9, value * 1e300, math.inf, math.nan, 0.0])
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return rng.choice(
            [value[:at] + rng.choice(TEXTS) + value[at:], value[:at], rng.choice(TEXTS), value * 2]
        )
    return deepcopy(rng.choice(ODD))


def mutate_tree(tree: Any, rng: Random) -> Any:
    """Changes a tree in place, one to four times; returns it."""
    holder = [tree]
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        places = _places(holder)
        at, key = rng.choice(places)
        value = at[key]
        match rng.randrange(8):
            case 0 | 1 | 2:
                at[key] = _near(value, rng)
            case 3:
                other, its = rng.choice(places)
                at[key] = deepcopy(other[its])
            case 4 if at is not holder:
                del at[key]
            case 5 if isinstance(at, list) and at is not holder:
                at.insert(rng.randrange(len(at) + 1), deepcopy(value))
            case 6 if isinstance(at, dict):
                at[
                    rng.choice([key + "x" if isinstance(key, str) else 0, *TEXTS[:4], rng.choice(list(at))])
                ] = value
            case _:
                at[key] = _near(value, rng)
    return holder[0]


def mutate_json(data: bytes, rng: Random) -> bytes:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return data
    return _written(mutate_tree(tree, rng))


def _written(tree: Any) -> bytes:
    """Returns the tree as JSON."""
    text = json.dumps(tree)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw, 4)
    return text.encode()


def mutate_msgpack(data: bytes, rng: Random) -> bytes:
    try:
        tree = mutate_tree(msgspec.msgpack.decode(data), rng)
        return msgspec.msgpack.encode(tree)
    except (msgspec.MsgspecError, RecursionError, OverflowError, UnicodeError, TypeError, ValueError):
        return data


def mutate_pickle(data: bytes, rng: Random) -> bytes:
    """Changes the data in a pickle, or its opcodes."""
    if rng.random() < 0.6:
        try:
            # Safe: the inputs hold plain data only, and `find_class` refuses all else.
            tree = _Plain(io.BytesIO(data)).load()
            return pickle.dumps(mutate_tree(tree, rng), rng.choice([2, 2, 3, 4, 5]))
        except Exception:  # a mutated pickle may be anything
            return data
    try:
        starts = [at for _, _, at in pickletools.genops(data) if at is not None]
    except Exception:
        return data
    parts = [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]
    for _ in range(rng.choice([1, 2, 4])):
        at = rng.randrange(len(parts))
        match rng.randrange(5):
            case 0:
                del parts[at : at + rng.choice([1, 1, 3])]
            case 1:
                parts.insert(at, rng.choice(parts))
            case 2:
                parts[at] = rng.choice(_OPCODES)
            case 3:
                parts.insert(at, rng.choice(_OPCODES))
            case 4:
                parts[at] = parts[at][:1] + rng.randbytes(len(parts[at]) - 1)
        if not parts:
            return data
    return b"".join(parts)


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


_OPCODES = [
    *(
        b"(",
        b"]",
        b"}",
        b")",
        b"N",
        b"\x88",
        b"\x89",
        b"s",
        b"u",
        b"e",
        b"a",
        b"t",
        b"\x85",
        b"\x86",
        b"\x87",
        b"0",
    ),
    *(
        b"2",
        b"q\x00",
        b"h\x00",
        b"j\xff\xff\xff\x7f",
        b"\x94",
        b"l",
        b"d",
        b"K\xff",
        b"M\xff\xff",
        b"J\xff\xff\xff\xff",
    ),
    *(
        b"I01\n",
        b"I" + b"9" * 30 + b"\n",
        b"L5L\n",
        b"F1e400\n",
        b"Fnan\n",
        b"G\x7f\xf0" + bytes(6),
        b"V\\ud800\n",
    ),
    *(b"\x8a\x0a" + b"\x7f" * 10, b"\x8b" + struct.pack("<i", -1), b"\x8b" + struct.pack("<i", 1 << 30)),
    *(b"X" + struct.pack("<I", 0xFFFFFFFF), b"X" + struct.pack("<I", 3) + b"\xed\xa0\x80", b"\x8c\x02\x1b["),
    *(
        b"\x8d" + bytes(8),
        b"\x8d" + b"\xff" * 8,
        b"B" + struct.pack("<I", 1 << 30),
        b"C\x01\xff",
        b"U\x01\xff",
    ),
    *(
        b"\x95" + b"\xff" * 8,
        b"\x80\x09",
        b"cos\nsystem\n",
        b"R",
        b"b",
        b"\x81",
        b"\x8f",
        b"\x90",
        b"\x91",
        b"\x96",
    ),
    *(
        b".",
        b"1",
        b"S'a'\n",
        b"T\x00\x00\x00\x00",
        b"p0\n",
        b"g0\n",
        b"r\xff\xff\xff\xff",
        b"o",
        b"i",
        b"P",
        b"Q",
    ),
]


# --- rings ----------------------------------------------------------------------------------------------


def mutate_ring(data: bytes, rng: Random) -> bytes:
    """Changes fields of the header, of communicators, frames, records, or of the description."""
    if len(data) < HEADER.itemsize or not data.startswith(MAGIC):
        return data
    out = bytearray(data)
    head = np.frombuffer(data, HEADER, 1)[0]
    tables = [("comm", COMM, "comm_cap"), ("frame", FRAME, "frame_cap"), ("rec", RECORD, "rec_cap")]
    for _ in range(rng.choice([1, 1, 2, 4])):
        which = rng.randrange(7)
        if which < 2:
            _set_field(out, 0, HEADER, rng)
        elif which == 2:
            out = _with_meta(out, head, rng)
        else:
            name, dtype, cap = tables[which % 3]
            used = {"comm": "comm_count", "frame": "frame_count", "rec": "rec_next"}[name]
            count = min(int(head[cap]), int(head[used]))
            if count:
                _set_field(out, int(head[f"{name}_off"]) + rng.randrange(count) * dtype.itemsize, dtype, rng)
    return bytes(out)


def _set_field(out: bytearray, begin: int, dtype: np.dtype[Any], rng: Random) -> None:
    name = rng.choice(dtype.names or ())
    if name == "magic":
        return
    kind, offset = dtype.fields[name][:2]  # type: ignore[index]
    at, size = begin + offset, kind.itemsize
    if at + size > len(out):
        return
    old = int.from_bytes(out[at : at + size], "little")
    new = rng.choice(
        [old + 1, old - 1, old ^ (1 << rng.randrange(8 * size)), rng.choice(NUMBERS), rng.choice(NUMBERS)]
    )
    out[at : at + size] = (new % (1 << (8 * size))).to_bytes(size, "little")


def _with_meta(out: bytearray, head: Any, rng: Random) -> bytearray:
    """Puts a changed description behind the ring, which is where a damaged offset may point, too."""
    begin, length = int(head["meta_off"]), int(head["meta_len"])
    made = mutate_json(bytes(out[begin : begin + length]), rng)
    for field, value in (("meta_off", len(out)), ("meta_len", len(made))):
        kind, offset = HEADER.fields[field][:2]  # type: ignore[index]
        out[offset : offset + kind.itemsize] = value.to_bytes(kind.itemsize, "little")
    return out + made


# --- archives -------------------------------------------------------------------------------------------


def members(data: bytes) -> list[tuple[str, bytes]]:
    """Returns the members of an archive, and the one of a compressed file."""
    if data.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return [(m.filename, archive.read(m)) for m in archive.infolist()[:16] if m.file_size < 1 << 20]
    for unpack in (gzip.decompress, bz2.decompress, lzma.decompress):
        try:
            data = unpack(data)
            break
        except Exception:  # not this one
            continue
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            return [
                (m.name, f.read()) for m in tar.getmembers()[:16] if (f := tar.extractfile(m)) is not None
            ]
    except tarfile.ReadError:
        return [("rank0.json", data)]


def pack(found: list[tuple[str, bytes]], kind: str) -> bytes:
    """Returns an archive with right checksums."""
    out = io.BytesIO()
    if kind in ("zip", "stored"):
        with zipfile.ZipFile(
            out, "w", zipfile.ZIP_DEFLATED if kind == "zip" else zipfile.ZIP_STORED
        ) as archive:
            for name, data in found:
                archive.writestr(zipfile.ZipInfo(name or "x"), data, archive.compression)
        return out.getvalue()
    if kind == "one":
        return gzip.compress(found[0][1] if found else b"", mtime=0)
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in found:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    packed = {"gz": lambda d: gzip.compress(d, mtime=0), "bz2": bz2.compress, "xz": lzma.compress}
    return packed[kind](out.getvalue()) if kind in packed else out.getvalue()


_REPEATED = 8 << 20
ARCHIVES = ("zip", "stored", "one", "gz", "bz2", "xz", "tar")


def mutate_archive(data: bytes, rng: Random) -> bytes:
    """Changes members, and how they are packed; or flags and sizes of an archive's own headers."""
    if data.startswith(b"PK") and rng.random() < 0.3:
        return _mutate_zip_headers(data, rng)
    try:
        found = members(data)
    except Exception:  # a mutated archive may be anything
        return data
    for _ in range(rng.choice([0, 1, 1, 2])):
        at = rng.randrange(len(found)) if found else -1
        match rng.randrange(7):
            case 6 if found and rng.random() < 0.1:
                found[at] = (found[at][0], _repeated(found[at][1], rng))
            case 0 if found:
                found[at] = (
                    rng.choice([*TEXTS[:20], "../x", "/a", "a.ucring", "a.ending", "b.exits", "d/"]),
                    found[at][1],
                )
            case 1 if found:
                found[at] = (found[at][0], pack(found[: at + 1], rng.choice(ARCHIVES)))
            case 2 if len(found) > 1:
                del found[at]
            case 3:
                found.append(("rank1.json", b" " * rng.choice([0, 1, 1 << 10, 1 << 20])))
            case _ if found:
                found[at] = (found[at][0], mutate_file(found[at][1], rng))
    try:
        return pack(found, rng.choice(ARCHIVES))
    except (ValueError, UnicodeError, struct.error):
        return data


def _repeated(data: bytes, rng: Random) -> bytes:
    """Repeats a piece until it has some MiB: packed it is small, but what it stands for takes memory."""
    begin = rng.randrange(len(data) + 1)
    piece = rng.choice([data[begin : begin + rng.choice([1, 2, 3, 16, 256])], b"[],", b"{},", b"}", b"]"])
    return data[:begin] + piece * (_REPEATED // max(1, len(piece))) + data[begin:]


def _mutate_zip_headers(data: bytes, rng: Random) -> bytes:
    out = bytearray(data)
    heads = [
        at for at in range(len(out) - 30) if out[at : at + 4] in (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06")
    ]
    for _ in range(rng.choice([1, 2, 4])):
        at = rng.choice(heads or [0]) + rng.randrange(4, 30)
        out[at : at + 2] = rng.choice(
            [b"\xff\xff", b"\0\0", b"\x01\0", b"\x08\0", b"\x0c\0", b"\x0e\0", b"\x63\0"]
        )
    return bytes(out)


def mutate_file(data: bytes, rng: Random) -> bytes:
    """Changes an input of any of the kinds that an archive may hold."""
    if data.startswith(MAGIC):
        return mutate_ring(data, rng)
    if data.startswith(b"\x80"):
        return mutate_pickle(data, rng)
    if data.startswith((b"{", b"[")):
        return mutate_json(data, rng)
    return data


# --- traces, ending files -------------------------------------------------------------------------------


def mutate_trace(data: bytes, rng: Random) -> bytes:
    """Changes a trace, compressed or not."""
    packed = data.startswith(b"\x1f\x8b")
    try:
        text = zlib.decompressobj(31).decompress(data, 1 << 20) if packed else data
    except zlib.error:
        return data
    text = mutate_json(text, rng)
    return gzip.compress(text, 1, mtime=0) if packed or rng.random() < 0.05 else text


_STACK_LINES = [
    *(
        b"Process state: sleeping",
        b"Fatal Python error: Segmentation fault",
        b"Fatal Python error: \x1b[2J",
        b"",
    ),
    *(b"Thread 0x1 (most recent call first):", b"Current thread 0x2 (most recent call first):", b"junk \xff"),
    *(
        b'  File "a.py", line 3 in f',
        b'  File "a.py", line ??? in f',
        b'  File "\x9b.py", line 99999999999 in \xed\xa0\x80',
    ),
]


def mutate_ending(data: bytes, rng: Random) -> bytes:
    """Changes an ending file: JSON, or the lines of a stacks file."""
    if data.startswith(b"{"):
        return mutate_json(data, rng)
    lines = data.split(b"\n")
    for _ in range(rng.choice([1, 1, 3])):
        at = rng.randrange(len(lines))
        match rng.randrange(3):
            case 0:
                lines.insert(at, rng.choice(_STACK_LINES))
            case 1:
                lines[at] = rng.choice(_STACK_LINES)
            case 2 if len(lines) > 1:
                del lines[at]
    return b"\n".join(lines)


def mutate_message(data: bytes, rng: Random) -> bytes:
    """Changes a message: JSON, JSON behind its length, or MessagePack."""
    if data[4:5] == b"{" and len(data) < 1 << 16:
        body = mutate_json(data[4:], rng)
        return struct.pack("<I", len(body)) + body
    return mutate_json(data, rng) if data.startswith((b"{", b"[")) else mutate_msgpack(data, rng)
