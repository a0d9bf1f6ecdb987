"""Where the ranks are that an operation has awaited in vain, by the recorders' rings on this host.

Imported when an operation has timed out, as the analyzer is, which is larger.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unicomm.comms.errors import CommTimeoutError
from unicomm.flight_recorder.recording import writer
from unicomm.flight_recorder.ring.files import trusted_owners
from unicomm.flight_recorder.ring.folder import SUFFIX, is_alive
from unicomm.flight_recorder.ring.reader import P2P, RECEIVE, Comm, Ring, RingError, read_ring

_PATIENCE = 1.0  # seconds: an error is not delayed for longer
_MOST_BYTES = 64 << 20  # a ring has some MiB; a larger file is not read, whatever its name is
_MOST_NAMED = 8
_MOST_RINGS = 64  # for the analyzer, which takes tens of milliseconds for each
_SURE = 0.8
_IN_FLIGHT = (1, 2)  # created, started


def explain(error: CommTimeoutError, uid: str) -> None:
    """Adds what the rings on this host tell to a timeout on communicator `uid`. Never raises.

    Sorts the culprits and says where they are, unless the backend has done so; unknown ones are absent. Then
    adds the analyzer's verdict, which has the rank numbers of the whole job.
    """
    if error.explained:
        return
    found: dict[int, tuple[str, str]] = {}
    verdict = ""
    try:
        paths = _look_for(set(error.culprits), uid, found)
        verdict = _verdict(paths)
    except Exception:
        logging.getLogger("unicomm").debug("cannot tell where the missing ranks are", exc_info=True)
    if not (error.dead or error.absent or error.late):
        kinds = {rank: found.get(rank, ("absent", ""))[0] for rank in error.culprits}
        error.sort_culprits(
            *([rank for rank, kind in kinds.items() if kind == which] for which in ("dead", "absent", "late"))
        )
        said = [f"; rank {rank} {found[rank][1]}" for rank in sorted(found) if found[rank][1]]
        error.message += "".join(said[:_MOST_NAMED])
    if verdict:
        error.message += f"\n  verdict (ranks of the whole job): {verdict}"


def _look_for(ranks: set[int], uid: str, found: dict[int, tuple[str, str]]) -> list[Path]:
    """Sets `found` to (kind, words) for ranks whose ring is here. Returns all rings of the communicator."""
    members = []
    for path, ring, of_comm in _rings(uid):
        members.append(path)
        for comm in of_comm:
            if comm.rank in ranks:
                found[comm.rank] = _describe(ring, comm)
    return members


def _rings(uid: str) -> Iterator[tuple[Path, Ring, list[Comm]]]:
    """The rings on this host that have the communicator, and its entries there."""
    own = writer.recorder_path()
    if own is None:
        return
    rings = sorted(own.parent.glob(f"*{SUFFIX}"), key=lambda p: p != own)
    owners = trusted_owners(own.parent)
    end = time.monotonic() + _PATIENCE
    for path in rings:
        if time.monotonic() > end:
            break
        try:
            if path.lstat().st_size > _MOST_BYTES:
                continue
            ring = read_ring(path, owners)
        except (OSError, RingError):
            continue
        of_comm = [comm for comm in ring.comms if comm.uid == uid]
        if of_comm:
            yield path, ring, of_comm


def neighbours(uid: str) -> dict[int, Path]:
    """The rings of the communicator's ranks whose processes are or were on this host."""
    return {
        comm.rank: path
        for path, ring, of_comm in _rings(uid)
        for comm in of_comm
        if ring.process_state != "elsewhere"
    }


def dead_ranks(rings: Mapping[int, Path]) -> list[int]:
    """Those of `neighbours` whose process is gone."""
    return sorted(rank for rank, path in rings.items() if is_alive(path) is False)


def progress(uid: str, rank: int, seq: int, messages: Sequence[tuple[bool, int, int]]) -> dict[int, int]:
    """The progress of each rank on this host in an operation of `rank`: 0 not issued, 1 issued, 2 started.

    `seq` is the number of a collective; `messages`, if there are any, are (send, peer, number in the pair).
    """
    found: dict[int, int] = {}
    for _, ring, of_comm in _rings(uid):
        for comm in of_comm:
            of = ring.records[ring.records["comm"] == comm.index]
            p2p = (of["flags"] & P2P) != 0
            if not messages:
                mine = of[~p2p & (of["seq"] == seq)]
                far = int(comm.coll_created >= seq)
                found[comm.rank] = 2 if far and len(mine) and int(mine[-1]["state"]) != _IN_FLIGHT[0] else far
                continue
            for send, peer, number in messages:
                if peer != comm.rank:
                    continue
                other = ((of["flags"] & RECEIVE) != 0) == send
                match = of[p2p & other & (of["peer"] == rank) & (of["seq"] >= number)]
                # The operation waits for all of its messages.
                found[peer] = min(found.get(peer, 2), 2 if len(match) else 0)
    return found


def _verdict(rings: list[Path]) -> str:
    if not 0 < len(rings) <= _MOST_RINGS:
        return ""
    from unicomm.flight_recorder.analysis.analyze import analyze
    from unicomm.flight_recorder.table.load import load

    # An operation that has just timed out is stuck, however short its timeout was.
    report = analyze(load(rings, named=False), stuck_after=0.0)
    return report.main.sentence if report.main.culprits and report.main.confidence >= _SURE else ""


def _describe(ring: Ring, comm: Comm) -> tuple[str, str]:
    if ring.process_state in ("ended", "killed"):
        return "dead", "is gone (its process ended)"
    of_comm = ring.records["comm"] == comm.index
    mine = ring.records[of_comm]
    late = bool(len(mine)) and int(mine[-1]["state"]) in _IN_FLIGHT
    # Ranks that are threads of one process share a ring, which does not tell whose its other records are.
    shared = sum(c.uid == comm.uid for c in ring.comms) > 1
    last = mine if shared else ring.records
    words = _place(ring, last[-1], comm) if len(last) else ""
    if ring.process_state == "stopped":
        words = f"is stopped{'; it ' + words if words else ''}"
    return "late" if late else "absent", words


def _place(ring: Ring, record: Any, comm: Comm) -> str:
    index = int(record["comm"])
    other = f" of '{ring.comms[index].name}'" if index != comm.index and index < len(ring.comms) else ""
    frame = ring.frame(record)
    where = f" ({frame})" if frame is not None else ""
    verb = "is in" if int(record["state"]) in _IN_FLIGHT else "was last in"
    return f"{verb} {ring.op(record)} #{int(record['seq'])}{other}{where}"
