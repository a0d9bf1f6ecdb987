"""Requests to the store when a communicator is created, from 2 ranks to 100 000.

    python -m benchmarks.creation_scale [--threads 4096] [--json result.json] [--plot picture.png]

Three parts:

1. The costs of torch's TCPStore on this machine: processor time of its server for a request, a key and a
   byte, which does not depend on other load on the machine.
2. The real rendezvous with ranks as threads over a store that counts requests (counting_store.py).
3. A discrete model: the same requests, in the order in which ranks make them, at a server that serves one
   after the other, with the measured costs. A test holds its number of requests to that of part 2. Beside
   it a flat exchange, in which every rank reads the value of every other one, as Gloo's own bootstrap does.

The model's round trip is that of a network and is set, not measured: `--round-trip`. All ranks start at once,
which is the worst for the server. The plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REQUESTS = 14  # of a rank that meets, exchanges one value and leaves: 9, and 5 for each value
MOST_MORE = 4 + 8 + 8  # of the last to come in the meeting, in the exchange, and of the last to leave
CHUNK = 1024  # keys in one request, as in rendezvous_parts.py


@dataclass(frozen=True)
class Costs:
    """Seconds. The defaults are what one machine had; `measure_costs` has those of this one.

    Attributes:
        request: of the server, for any request; check_key, get_key: for each key in one of many.
        byte: of the server, for a byte of a value.
        client_key: of a rank, for each value that it reads in one request of many.
        round_trip: between a rank and the server, on an idle network.
    """

    request: float = 10e-6
    check_key: float = 0.35e-6
    get_key: float = 1.6e-6
    byte: float = 0.35e-9
    client_key: float = 3e-6
    round_trip: float = 50e-6


@dataclass
class Result:
    """One creation in the model."""

    ranks: int
    seconds: float
    requests: int
    polls: int
    gigabytes: float  # that the server sends and receives
    busy: float  # seconds of the server


Effect = Callable[[], Any]
Step = tuple[str, float, int, Effect]  # kind, seconds of the server, bytes, what it does there
_SLEEP = "sleep"


class _Model:
    """The store's server and all ranks, each a generator of the requests that it makes."""

    def __init__(self, size: int, costs: Costs, exchanges: int, value: int, outcome: int) -> None:
        self.size, self.costs = size, costs
        self._steps, self._value, self._outcome = 1 + exchanges, value, outcome
        self._arrived = [0] * self._steps
        self._decided = [False] * self._steps
        self._closed = 0
        self.now = 0.0

    def rank(self) -> Generator[Step, Any, None]:
        """What Rendezvous does from `meet` to `close`; compare rendezvous.py."""
        small = 40  # bytes of an outcome that says only that all is well
        for _ in range(3):  # which meeting, and how did it and the one before it end
            yield self._request(2)
        for step in range(self._steps):
            mine = 100 + (self._value if step else 0)
            yield self._request(mine)
            last = (yield self._request(4, lambda s=step: self._come(s))) == self.size
            outcome = self._outcome if step else small
            if last:
                yield from self._complete(step, mine, outcome)
            elif not (yield self._request(0, lambda s=step: self._decided[s])):
                yield from self._poll(step)
                yield self._request(outcome)
            else:
                yield self._bytes(outcome)
            if last:
                yield self._request(outcome)
            yield self._request(0)  # its own post goes
        if (yield self._request(4, self._leave)) == self.size:
            for _ in range(8):  # the last one cleans
                yield self._request(0)

    def _complete(self, step: int, post: int, outcome: int) -> Iterator[Step]:
        costs = self.costs
        yield self._request(6)
        for key, moved, client in (
            (costs.check_key, 0, 0.0),
            (costs.get_key, post, costs.client_key),
        ):
            for start in range(0, self.size, CHUNK):
                keys = min(CHUNK, self.size - start)
                yield self._request(keys * moved, more=keys * key)
                if client:
                    yield (_SLEEP, keys * client, 0, _nothing)
        yield self._request(outcome, lambda: self._decide(step))
        for _ in range(5 if step else 1):  # the step before goes, or: the next meeting is another one
            yield self._request(0)

    def _poll(self, step: int) -> Iterator[Any]:
        """`StoreClient.wait`."""
        least, most = 0.001 + self.size * 2e-5, 0.5 + self.size * 5e-5
        began = self.now
        while not (yield ("poll", self.costs.request, 0, lambda: self._decided[step])):
            yield (_SLEEP, min(max((self.now - began) / 20, least), most), 0, _nothing)

    def _request(self, moved: int, effect: Effect | None = None, more: float = 0.0) -> Step:
        costs = self.costs
        return ("request", costs.request + more + moved * costs.byte, moved, effect or _nothing)

    def _bytes(self, moved: int) -> Step:
        """The rest of an answer to a request that was made."""
        return ("answer", moved * self.costs.byte, moved, _nothing)

    def _come(self, step: int) -> int:
        self._arrived[step] += 1
        return self._arrived[step]

    def _decide(self, step: int) -> None:
        self._decided[step] = True

    def _leave(self) -> int:
        self._closed += 1
        return self._closed


def _nothing() -> None:
    pass


def simulate(size: int, costs: Costs, exchanges: int, value: int, outcome: int | None = None) -> Result:
    """A creation of `size` ranks that meet and exchange values of `value` bytes some times.

    `outcome`: bytes of all values together as they go through the store; default: not compressed.
    """
    model = _Model(size, costs, exchanges, value, size * value if outcome is None else outcome)
    ranks = [model.rank() for _ in range(size)]
    counts = {"request": 0, "poll": 0, "answer": 0}
    free = busy = ended = 0.0
    moved = 0
    order = iter(range(1 << 62))
    # When what happens: a request comes to the server, or a rank goes on with an answer.
    heap: list[tuple[float, int, int, Step | None, Any]] = [
        (0.0, next(order), rank, None, None) for rank in range(size)
    ]
    half = costs.round_trip / 2
    while heap:
        now, _, rank, step, answer = heapq.heappop(heap)
        if step is not None:  # one after the other
            kind, seconds, count, effect = step
            free = max(free, now) + seconds
            busy += seconds
            moved += count
            counts[kind] += 1
            heapq.heappush(heap, (free + half, next(order), rank, None, effect()))
            continue
        model.now = ended = now
        try:
            request = ranks[rank].send(answer)
        except StopIteration:
            continue
        if request[0] == _SLEEP:
            heapq.heappush(heap, (now + request[1], next(order), rank, None, None))
        else:
            heapq.heappush(heap, (now + half, next(order), rank, request, None))
    return Result(size, ended, counts["request"], counts["poll"], moved / 1e9, busy)


def flat(size: int, costs: Costs, value: int) -> Result:
    """Every rank posts a value and reads all others' by their keys: the server is never idle."""
    chunks = -(-size // CHUNK)
    requests = size * (2 + chunks)
    busy = requests * costs.request + size * size * (costs.get_key + value * costs.byte)
    return Result(size, busy + costs.round_trip, requests, 0, size * size * value / 1e9, busy)


def place(rank: int) -> bytes:
    """What a rank says about itself: 8 ranks a host, as the backend "auto" does."""
    host = rank // 8
    boot = str(uuid.UUID(bytes=hashlib.md5(b"%d" % host).digest()))
    address = f"10.{host >> 16}.{host >> 8 & 255}.{host & 255}"
    mine = {
        "host": f"node{host} {boot} pid:[4026531836]",
        "address": address,
        "network": f"{boot} net:[4026531840]",
    }
    return json.dumps(mine).encode()


def outcome_bytes(size: int) -> tuple[int, int]:
    """All ranks' values together: as they are, and as they go through the store."""
    from unicomm.comms.membership.rendezvous_parts import pack, shrink

    body = pack([place(rank) for rank in range(size)])
    return len(body), len(shrink(body))


_SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def measure_costs(round_trip: float) -> Costs:
    """Those of torch's TCPStore here: processor time, so that other programs hardly matter."""
    from torch.distributed import TCPStore

    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        store = TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)

        def used() -> float:
            tasks = Path(f"/proc/{server.pid}/task")
            return sum(int((tasks / t / "schedstat").read_text().split()[0]) for t in os.listdir(tasks)) / 1e9

        def cost(call: Callable[[], Any], times: int) -> tuple[float, float]:
            began, own = used(), time.thread_time()
            for _ in range(times):
                call()
            return (used() - began) / times, (time.thread_time() - own) / times

        keys = [f"unicomm/main/world/0/1/{r:06d}" for r in range(CHUNK)]
        for r, key in enumerate(keys):
            store.set(key, bytes(100) + place(r))
        store.set("big", bytes(1 << 20))
        request, _ = cost(lambda: store.add("number", 1), 20_000)
        check, _ = cost(lambda: store.check(keys), 300)
        get, own = cost(lambda: store.multi_get(keys), 300)
        big, _ = cost(lambda: store.get("big"), 300)
        server.kill()
    byte = (big - request) / (1 << 20)
    each = len(place(0)) + 100
    return Costs(
        request=request,
        check_key=(check - request) / CHUNK,
        get_key=max(0.0, (get - request) / CHUNK - each * byte),
        byte=byte,
        client_key=own / CHUNK,
        round_trip=round_trip,
    )


def count_threads(size: int) -> dict[str, Any]:
    """The real rendezvous with `size` ranks as threads; what they asked of the store."""
    from benchmarks.counting_store import CountingStore
    from unicomm.comms.membership.rendezvous import meet

    store = CountingStore(size)
    failed: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            with meet(store.view(rank), "main", rank, size, timeout=3600, hello={"backend": "auto"}) as met:
                assert len(met.exchange("auto", place(rank))) == size
        except BaseException as error:
            failed.append(error)

    began = time.perf_counter()
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    counts = store.counts
    middle = sorted(counts, key=lambda c: c.requests)[size // 2]
    return {
        "ranks": size,
        "seconds": time.perf_counter() - began,
        "requests of a rank, median": middle.requests,
        "requests of a rank, most": max(c.requests for c in counts),
        "keys written by a rank, most": max(c.written for c in counts),
        "keys read by a rank, median": sorted(c.read for c in counts)[size // 2],
        "keys read by a rank, most": max(c.read for c in counts),
        "bytes received by a rank, median": sorted(c.received for c in counts)[size // 2],
        "polls a rank": sum(c.polls for c in counts) / size,
        "keys at any time, most": store.most_keys,
        "keys left": store.num_keys(),
    }


def draw(path: Path, rows: list[dict[str, Any]], costs: Costs) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    sizes = [row["ranks"] for row in rows]
    lines = (
        ("unicomm", "ours", "#3a7d44", "-"),
        ("the same, not compressed", "raw", "#3a7d44", ":"),
        ("flat: every rank reads every key", "flat", "#b5483a", "-"),
    )
    for label, name, color, style in lines:
        left.loglog(sizes, [row[name]["seconds"] for row in rows], style, color=color, label=label)
        right.loglog(
            sizes, [max(row[name]["gigabytes"], 1e-6) for row in rows], style, color=color, label=label
        )
    left.set_ylabel("seconds until all have met and exchanged one value")
    right.set_ylabel("gigabytes through the store")
    for axes in (left, right):
        axes.set_xlabel("ranks")
        axes.axvline(16384, color="#999999", linewidth=0.6)
        axes.grid(True, which="major", alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(
        f"Model of one TCPStore: {costs.request * 1e6:.1f} µs a request,"
        f" {1e-9 / costs.byte:.1f} GB/s, round trip {costs.round_trip * 1e6:.0f} µs",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=4096, help="most ranks as threads")
    parser.add_argument("--ranks", type=int, default=100_000, help="most ranks of the model")
    parser.add_argument("--round-trip", type=float, default=50e-6, help="seconds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()

    costs = measure_costs(options.round_trip)
    print("costs in microseconds:", {name: round(value * 1e6, 5) for name, value in asdict(costs).items()})
    threading.stack_size(256 * 1024)
    counted = []
    size = 2
    while size <= options.threads:
        counted.append(count_threads(size))
        print("threads:", json.dumps(counted[-1]), flush=True)
        size *= 4 if size < 64 else 2
    rows = []
    sizes = [4**k for k in range(1, 20) if 4**k < options.ranks] + [options.ranks]
    for size in sizes:
        raw, small = outcome_bytes(size)
        value = len(place(size - 1))
        rows.append(
            {
                "ranks": size,
                "value bytes": value,
                "all values": raw,
                "compressed": small,
                "meeting alone": asdict(simulate(size, costs, 0, 0)),
                "ours": asdict(simulate(size, costs, 1, value, small)),
                "raw": asdict(simulate(size, costs, 1, value, raw)),
                "flat": asdict(flat(size, costs, value)),
            }
        )
        names = ("meeting alone", "ours", "raw", "flat")
        shown = {name: round(rows[-1][name]["seconds"], 3) for name in names}
        print(f"model, {size} ranks, seconds:", shown, flush=True)
    if options.json:
        result = {"costs": asdict(costs), "threads": counted, "model": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        draw(options.plot, rows, costs)


if __name__ == "__main__":
    main()
