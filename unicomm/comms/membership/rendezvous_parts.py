"""Parts of the rendezvous: checks of its arguments, its failures, and the encoding of values in the store."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from unicomm.c10d.compat import Store
from unicomm.comms.errors import (
    AbortedError,
    BackendError,
    CommError,
    CommTimeoutError,
    InvalidArgumentError,
    MismatchError,
    PeerLostError,
)

DIGEST = 8  # bytes
_LONGEST = 1e9  # seconds
_MOST_RANKS = 1 << 20  # that a failure may name, if its members disagree on their number
_MAX_NAME = 1024  # TCPStore takes keys of up to 8 KiB
_WORTH = 4096  # bytes from which on compressing pays


def check_meeting(
    store: Store | None, name: str, rank: int, size: int, timeout: float, labels: Sequence[int] | None
) -> None:
    """Checks the arguments of `meet`; raises `InvalidArgumentError`."""
    problem = hint = ""
    if not isinstance(name, str) or not 0 < len(name.encode()) <= _MAX_NAME:
        problem, hint = f"name={name!r} is no name", f"pass a text of up to {_MAX_NAME} bytes"
    elif not 0 <= rank < size:
        problem, hint = f"rank={rank} is not in range [0, {size})", "ranks count from 0"
    elif not timeout > 0:
        problem, hint = f"timeout={timeout} is not positive", "pass seconds"
    elif labels is not None and len(set(labels)) != size:
        problem, hint = f"labels={labels!r} are not {size} different ranks", "pass one for each member"
    elif store is None and size > 1:
        problem, hint = f"{size} members need a store", "pass store=, or start the program with torchrun"
    if problem:
        raise InvalidArgumentError(problem, hint=hint)


def compare(headers: dict[int, bytes]) -> dict[str, Any] | None:
    """The failure if the headers differ. The majority is right; in a tie, the lowest rank is."""
    if len(set(headers.values())) <= 1:
        return None
    members = {r: json.loads(header) for r, header in sorted(headers.items())}
    differences: dict[str, list[tuple[str, list[list[int]]]]] = {}
    culprits: set[int] = set()
    for key in sorted({key for member in members.values() for key in member}):
        groups: dict[str, list[int]] = {}
        for r, member in members.items():
            groups.setdefault(repr(member[key]) if key in member else "not given", []).append(r)
        if len(groups) > 1:
            values = sorted(groups, key=lambda value: (len(groups[value]), -groups[value][0]))
            culprits.update(r for value in values[:-1] for r in groups[value])
            differences[key] = [(value[:200], ranges_of(groups[value])) for value in values[-8:]]
    return {"kind": "mismatch", "culprits": ranges_of(sorted(culprits)), "differences": differences}


def error_of(failure: dict[str, Any], what: str, comm: str, rank: int, labels: Sequence[int]) -> CommError:
    """The error for a failure. All members raise the same one, each with its own rank.

    `what` is what the members were to do ("arrive"). `labels` are their global ranks, which `culprits` holds.
    """
    members = range(len(labels))

    def global_ranks(ranges: Any) -> list[int]:
        if "global" in failure:
            return members_of(ranges)
        # A member that expects fewer ranks has no global ranks of the others.
        return [labels[r] if r < len(labels) else r for r in members_of(ranges)]

    culprits = global_ranks(failure["culprits"])
    # A message names global ranks: it says so where the ranks of the communicator differ from them.
    word = "rank" if list(labels) == list(members) else "global rank"

    def names(ranks: Sequence[int]) -> str:
        spans = [str(a) if a == b else f"{a}-{b}" for a, b in ranges_of(sorted(ranks))]
        return f"{word}{'s' if len(ranks) > 1 else ''} {', '.join(spans)}"

    who, kind = names(culprits), failure["kind"]
    error: type[CommError] = MismatchError
    if kind == "timeout":
        error, limit = CommTimeoutError, f"within {failure['seconds']:g} s"
        if failure["stuck"]:
            text = f"all did {what} {limit}, but {who if culprits else 'one'} stopped before it could answer"
        else:
            text = f"{who} did not {what} {limit}; {names(sorted(set(labels) - set(culprits)))} did"
        hint = f"see whether {who} started and what was printed there last; raise timeout= for slow ranks"
    elif kind == "mismatch":
        lines = [
            f"{key} is " + " and ".join(f"{v} on {names(global_ranks(rs))}" for v, rs in groups)
            for key, groups in failure["differences"].items()
        ]
        text = "the members do not agree: " + ("; ".join(lines) or f"size is {len(labels)} on {who} only")
        hint = "make the same call with the same arguments on all members"
    elif kind == "dead":
        error, text = (
            PeerLostError,
            f"{who} {'is' if len(culprits) == 1 else 'are'} gone: the process has ended",
        )
        hint = f"look at the output and the exit code of {who}"
    elif kind == "twice":
        text = f"two processes call themselves {who}"
        hint = "give each its own rank; if one was restarted alone, let all others try again as well"
    elif "cause" in failure:
        error, text = _CAUSES[failure["cause"]], failure["reason"]
        hint = f"see whether {who} runs, and what was printed there last"
    else:
        error, text = PeerLostError, f"{who} left: {failure['reason']}"
        hint = f"look at what {who} printed last"
    dead = culprits if kind == "dead" else ()
    return error(text, comm=comm, rank=rank, culprits=culprits, dead=dead, hint=hint)


#: Errors about other ranks than the member that leaves because of them.
_CAUSES: dict[str, type[CommError]] = {
    "timeout": CommTimeoutError,
    "lost": PeerLostError,
    "aborted": AbortedError,
}


def leaving(rank: int, member: int, reason: str, error: BaseException | None) -> dict[str, Any]:
    """The failure that a member tells the others when it leaves.

    `rank`, `member`: its rank in this meeting, and its global rank. The culprits are the ranks that `error`
    names, if it left because of them; else it is the culprit itself, for the `reason`.
    """
    for cause, kind in _CAUSES.items():
        if isinstance(error, kind) and error.culprits and member not in error.culprits:
            return {
                "kind": "left",
                "culprits": ranges_of(sorted(error.culprits)),
                "global": True,
                "reason": error.message,
                "cause": cause,
            }
    return {"kind": "left", "culprits": [[rank, rank]], "reason": reason}


def read_failure(text: bytes, size: int) -> dict[str, Any]:
    """Reads a failure for `error_of`; raises `ValueError` for anything else."""
    kinds = {
        "timeout": ("seconds", "stuck"),
        "mismatch": ("differences",),
        "twice": (),
        "left": ("reason",),
        "dead": (),
    }
    try:
        failure = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(failure, dict) or failure.get("kind") not in tuple(kinds):
        raise ValueError("a failure of no known kind")
    if missing := [name for name in kinds[failure["kind"]] if name not in failure]:
        raise ValueError(f"a failure without {missing[0]}")
    if failure.get("cause", "lost") not in [*_CAUSES] or not isinstance(failure.get("reason", ""), str):
        raise ValueError("a failure with an unknown cause")
    seconds = failure.get("seconds", 0)
    if not isinstance(seconds, (int, float)) or not 0 <= seconds <= _LONGEST:
        raise ValueError("seconds are no time")
    differences = failure.get("differences", {})
    if not isinstance(differences, dict) or not all(isinstance(v, list) for v in differences.values()):
        raise ValueError("differences are no object of lists")
    groups = [group for value in differences.values() for group in value]
    if any(not isinstance(group, list) or len(group) != 2 for group in groups):
        raise ValueError("a difference that names no ranks")
    # Members that disagree on their number may name ranks that this one does not expect.
    sizes = [int(v) for v, _ in differences.get("size", []) if isinstance(v, str) and v.isdecimal()]
    most = _MOST_RANKS if "global" in failure else min(max([size, *sizes]), max(size, _MOST_RANKS))
    for pairs in [failure.get("culprits"), *(ranks for _, ranks in groups)]:
        _check_ranges(pairs, most)
    return failure


def _check_ranges(pairs: Any, size: int) -> None:
    # Checked before the ranges are expanded: a range of a few characters may mean any number of ranks.
    if not isinstance(pairs, list):
        raise ValueError("ranks are no list")
    for pair in pairs:
        good = isinstance(pair, list) and len(pair) == 2 and all(type(r) is int for r in pair)
        if not good or not 0 <= pair[0] <= pair[1] < size:
            raise ValueError(f"{pair!r} is no range of {size} ranks")


def encode(value: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(value, sort_keys=True).encode()
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{value!r} is not JSON: {error}", hint="pass plain values") from None


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:DIGEST]


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")


def ranges_of(ranks: Sequence[int]) -> list[list[int]]:
    """Sorted numbers as [first, last] pairs, which stay short for 100 000 ranks of which one is missing."""
    pairs: list[list[int]] = []
    for r in ranks:
        if pairs and pairs[-1][1] == r - 1:
            pairs[-1][1] = r
        else:
            pairs.append([r, r])
    return pairs


def members_of(pairs: list[list[int]]) -> list[int]:
    return [r for first, last in pairs for r in range(first, last + 1)]


def pack(values: list[bytes]) -> bytes:
    return struct.pack(f"<{len(values)}I", *map(len, values)) + b"".join(values)


def unpack(body: bytes, count: int) -> list[bytes]:
    """Reverses `pack`; raises `ValueError` for anything else."""
    at, values = 4 * count, []
    if len(body) < at:
        raise ValueError(f"{len(body)} bytes for {count} members")
    for length in struct.unpack_from(f"<{count}I", body):
        values.append(body[at : at + length])
        at += length
    if at != len(body):
        raise ValueError(f"{len(body)} bytes where {at} were announced")
    return values


def shrink(body: bytes) -> bytes:
    """`body` as it is put into the store: compressed if that is shorter.

    The members' values differ little, and every member reads all of them, which is the cost of creation in a
    large job (docs/design/scale.md).
    """
    smaller = zlib.compress(body, 1) if len(body) >= _WORTH else body
    return b"z" + smaller if len(smaller) < len(body) else b"=" + body


def grow(body: bytes, most: int) -> bytes:
    """Reverses `shrink`, for up to `most` bytes; raises `ValueError` for anything else."""
    kind, data = body[:1], body[1:]
    if kind == b"z":
        expander = zlib.decompressobj()
        try:
            data = expander.decompress(data, most + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from None
        if not expander.eof or expander.unused_data:
            raise ValueError("a compressed text without an end, or with more after it")
    elif kind != b"=":
        raise ValueError(f"a text of kind {kind!r}")
    if len(data) > most:
        raise ValueError(f"more than {most} bytes")
    return data


def damaged(error: Exception, comm: str) -> BackendError:
    """The error when a key of the rendezvous holds what no member writes."""
    return BackendError(
        f"the store holds something that no member wrote: {type(error).__name__}: {error}",
        comm=comm,
        hint="another program may use the same store, or a stranger may reach it",
    )
