"""How the members of a communicator-to-be meet and agree, over any `torch.distributed` store.

All members call `meet` with the same name; it returns when all are there and agree on `hello`, or raises
the same error on every member that came. Only the members touch the store, so groups may meet in any order.

The protocol
------------
Keys live under ``unicomm/<name>/<group>/``, where <group> is ``world`` when no labels are given and a hash
of the labels otherwise. ``generation`` there counts the meetings that have been decided; a meeting happens
under ``<generation>/``. It is a sequence of steps, numbered from 0 (the meeting itself), one for each
collective call; every step works the same way, under ``<generation>/<step>/``:

1. Each member posts its value under its rank, by compare-and-set, so that a second process with the same
   rank is noticed at once. Then it adds 1 to ``arrived``.
2. The member that makes ``arrived`` complete is the last comer. It reads all posts, compares their headers
   and puts the outcome into ``result``, for which all the others wait.
3. A member whose deadline passes, or that is interrupted, puts a failure into ``result``. ``abandon``
   elects the one that looks who is missing, so that a big job does not storm the store.

``result`` is written by compare-and-set only: the first outcome stands and everybody takes that one, also a
member that wanted to write another. So no member fails while the others succeed, and none succeeds alone.
An outcome in step 0 ends the generation: its writer moves ``generation`` on, and whoever comes and finds a
decided generation moves it on too, should the writer have died in between. Hence a late comer never meets
the posts of an attempt that failed: if that was for want of members, it starts the next attempt, where those
who retry join it; any other failure it is told at once (and it posts in the old generation, to hear it once).

Cleaning. A post is deleted by its owner after a success (the last comer has read it). The shared keys of a
step go when all have posted the next one, because then all have read the outcome, and those of the final
step with the last ``closed``. After a failure nobody can know who still reads, so the keys stay, marked by
``failed``, until the next success under this name: by then every member has left the failed attempt.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unicomm.c10d.compat import Store
from unicomm.comms.errors import (
    AbortedError,
    BackendError,
    CommError,
    InvalidArgumentError,
    NotReadyError,
)

from .rendezvous_parts import (
    CHUNK,
    DIGEST,
    StoreClient,
    check_meeting,
    compare,
    damaged,
    describe,
    digest,
    encode,
    error_of,
    grow,
    pack,
    ranges_of,
    read_failure,
    shrink,
    unpack,
)

MAX_VALUE = 1 << 20  # bytes that one member may contribute to a step: these are addresses, not tensors
_LOOK = 0.2  # seconds between two looks at the peers
_PART = 4 << 20  # TCPStore takes values of up to 8 MiB; longer outcomes go in parts
_NONCE = 16  # characters before a post's header, which make each post unique
_SUCCESS, _IN_PARTS, _FAILURE = b"+", b"*", b"-"  # how outcomes begin


class _Late(Exception):
    """The attempt had failed for want of this member before it came."""

    def __init__(self, error: CommError) -> None:
        self.error = error


def meet(
    store: Store | None,
    name: str,
    rank: int,
    size: int,
    *,
    timeout: float,
    hello: Mapping[str, Any],
    labels: Sequence[int] | None = None,
    check_peers: Callable[[], None] | None = None,
) -> Rendezvous:
    """Meets the other members; to be called by all of them, and by nobody else.

    Args:
        store: any store that the members share; None is enough for a single one.
        name: of the meeting, the same on all members. It may be used again, also after a failure.
        rank, size: this member's number, and how many there are.
        timeout: seconds for the meeting and all that is done with the result.
        hello: what the members have to agree on, as JSON values; compared key by key, besides the size.
        labels: the members' global ranks in order of rank, the same on all members. Groups with different
            labels do not disturb each other, whatever their names. Without, the members are the whole world.
        check_peers: called several times a second while it waits; what it raises ends the meeting.

    Returns when all members have come and agree. Raises on all that came: `CommTimeoutError` naming those
    who did not, `MismatchError` naming the minority, `PeerLostError` naming a member that was interrupted;
    `BackendError` when the store fails, and `InvalidArgumentError` before anything was sent.
    """
    check_meeting(store, name, rank, size, timeout, labels)
    rendezvous = Rendezvous(store, name, rank, size, min(timeout, 1e8), labels, check_peers)
    try:
        rendezvous._join(hello)
    except BaseException:
        rendezvous.close()
        raise
    return rendezvous


class Rendezvous:
    """The agreement among the members of one communicator-to-be; `meet` makes it.

    Its methods are collective among the members, who call them in the same order, each from one thread at a
    time. All of them together have the timeout that was given to `meet`. They raise `CommTimeoutError` when
    members do not come, `MismatchError` when they call different things, `PeerLostError` when one left, and
    `BackendError` when the store fails: on every member and for good, later calls raise the same error. As a
    context manager it calls `abort` when the block raises, and then `close`.

    Attributes:
        name: as given to `meet`.
        rank, size: this member's number, and how many there are.
        labels: the members' global ranks.
        uid: 16 hexadecimal digits, the same on all members and different for every meeting.
    """

    _client: StoreClient  # only when there are others

    def __init__(
        self,
        store: Store | None,
        name: str,
        rank: int,
        size: int,
        limit: float,
        labels: Sequence[int] | None,
        check_peers: Callable[[], None] | None = None,
    ) -> None:
        self._check_peers = check_peers
        self.name, self.rank, self.size, self.uid = name, rank, size, ""
        self.labels = tuple(range(size) if labels is None else map(int, labels))
        self._timeout, self._deadline = limit, time.monotonic() + limit
        self._nonce = secrets.token_hex(_NONCE // 2).encode()
        members = "world" if labels is None else f"g-{digest(repr(self.labels).encode()).hex()}"
        self._base = f"unicomm/{name}/{members}"
        self._generation = self._step = 0
        self._failure: CommError | None = None
        self._earlier: dict[str, Any] | None = None  # how the meeting before this one failed
        self._closed = False
        if store is not None and size > 1:
            self._client = StoreClient(store, name, size)

    def remaining(self) -> float:
        """Seconds that are left of the timeout; 0 when it has passed."""
        return max(0.0, self._deadline - time.monotonic())

    def exchange(self, tag: str, value: bytes) -> list[bytes]:
        """All-gathers a value of up to `MAX_VALUE` bytes. Returns everybody's, in order of rank.

        `tag` says what it is about: the members compare it, and errors show it.
        """
        header = {"call": "exchange", "tag": tag}
        body = self._run(header, value, lambda all_: shrink(pack(all_)), f"reach exchange '{tag}'")
        try:
            return unpack(grow(body, self.size * (MAX_VALUE + 4)), self.size)
        except ValueError as error:
            raise damaged(error, self.name) from error

    def broadcast(self, tag: str, value: bytes | None, root: int = 0) -> bytes:
        """Returns member `root`'s value (up to `MAX_VALUE` bytes) on all; the others' values are ignored.

        It returns when all members have come, like `exchange`.
        """
        if not 0 <= root < self.size or (value is None and self.rank == root):
            raise InvalidArgumentError(
                f"broadcast '{tag}' from root {root} of {self.size} with value={value!r}",
                comm=self.name,
                rank=self.rank,
                hint="root is one of the members, and it gives the value",
            )
        mine = value if self.rank == root and value is not None else b""
        header = {"call": "broadcast", "tag": tag, "root": root}
        return self._run(header, mine, lambda values: values[root], f"reach broadcast '{tag}'")

    def check(self) -> None:
        """Raises if a member has left, or `check_peers` says that one cannot come any more. Does not wait.

        For members that connect to each other by other means between two collective calls.
        """
        if self._failure is not None:
            raise self._failure
        if self.size == 1:
            return
        if self._check_peers is not None:
            self._check_peers()
        outcome = self._client.peek(self._key("result"))
        try:
            failure = self._failure_in(outcome)
        except ValueError as error:
            raise damaged(error, self.name) from error
        if failure is not None:
            self._failure = self._error(failure, "connect")
            raise self._failure

    def abort(self, reason: str) -> None:
        """Leaves before the end: the others' next call raises `PeerLostError` at once, with `reason`.

        Called by the member that cannot go on, alone; without effect after an error or `close`.
        """
        if self._failure is not None or self._closed:
            return
        self._failure = AbortedError(f"this member left: {reason}", comm=self.name, rank=self.rank)
        if self.size == 1:
            return
        with contextlib.suppress(BackendError):
            failure = {"kind": "left", "culprits": [[self.rank, self.rank]], "reason": reason}
            # If this step has succeeded meanwhile, the others go on to the next one and must not wait there.
            for step in (self._step, self._step + 1):
                if self._fail(step, failure).startswith(_FAILURE):
                    break

    def close(self) -> None:
        """Ends this member's part, without waiting; the last one to close removes what is left in the store.

        Never raises for a store that is gone. To be called by every member, also after an error.
        """
        done, self._closed = self._closed or self.size == 1, True
        if done:
            return
        with contextlib.suppress(BackendError):
            # A meeting that failed may still have readers: only the next success removes its keys.
            here = f"{self._base}/{self._generation}"
            if self.uid and self._client.add(f"{here}/closed") == self.size:
                failed = bool(self._client.peek(f"{here}/failed"))
                for step in range(self._step - 1, self._step + (2 if failed else 0)):
                    self._erase(self._generation, step, posts=failed)
                self._client.delete([f"{here}/closed", f"{here}/failed"])

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.abort(describe(error))
        self.close()

    def _join(self, hello: Mapping[str, Any]) -> None:
        header = {"size": self.size, **hello}
        encode(header)  # raises before anything is sent
        while not self.uid:
            self._generation = 0 if self.size == 1 else self._open_generation()
            try:
                uid = self._run(header, b"", lambda _: secrets.token_hex(8).encode(), "arrive")
            except _Late as late:
                if self.remaining() <= 0:
                    raise late.error from None
            else:
                self.uid = uid.decode()

    def _open_generation(self) -> int:
        """The first generation without an outcome, unless the one before has one to be told."""
        while True:
            generation = int(self._client.put_first(f"{self._base}/generation", b"0"))
            if not self._client.peek(f"{self._base}/{generation}/0/result"):
                break
            self._advance(generation)
        before = f"{self._base}/{generation - 1}/0"
        outcome = self._client.peek(f"{before}/result")
        try:
            self._earlier = self._failure_in(outcome)
        except ValueError as error:
            raise damaged(error, self.name) from error
        if self._earlier is None or self._earlier["kind"] == "timeout":
            return generation
        if self._client.put_first(f"{before}/{self.rank}", self._nonce) == self._nonce:
            raise self._error(self._earlier, "arrive")
        return generation

    def _advance(self, generation: int) -> None:
        # Without effect if somebody has done it.
        self._client.replace(f"{self._base}/generation", b"%d" % generation, b"%d" % (generation + 1))

    def _key(self, name: str, step: int | None = None) -> str:
        return f"{self._base}/{self._generation}/{self._step if step is None else step}/{name}"

    def _run(
        self, header: dict[str, Any], value: bytes, combine: Callable[[list[bytes]], bytes], what: str
    ) -> bytes:
        """One step: posts `value`, and returns what `combine` makes of everybody's, on the last comer."""
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise NotReadyError("the rendezvous is closed", comm=self.name, rank=self.rank, hint="meet again")
        encoded, value = encode(header), bytes(memoryview(value))
        if len(value) > MAX_VALUE:
            raise InvalidArgumentError(
                f"{len(value)} bytes are too many to {what}",
                comm=self.name,
                rank=self.rank,
                hint=f"a member may give up to {MAX_VALUE} bytes; send larger data by the communicator",
            )
        if self.size == 1:
            return combine([value])
        try:
            body = self._play(encoded, value, combine, what)
        except CommError as error:
            self._failure = error
            raise
        except BaseException as error:
            if not isinstance(error, _Late):
                self.abort(describe(error))  # e.g. Ctrl-C: the others need not wait for this member
            raise
        self._step += 1
        return body

    def _play(self, header: bytes, value: bytes, combine: Callable[[list[bytes]], bytes], what: str) -> bytes:
        mine, post = self._key(str(self.rank)), self._nonce + header + b"\n" + value
        if self._client.put_first(mine, post) != post:
            self._fail(self._step, {"kind": "twice", "culprits": [[self.rank, self.rank]]})
        elif self._client.add(self._key("arrived")) >= self.size:
            self._complete(combine)
        outcome = self._await(self._deadline) or self._give_up()
        try:
            if outcome.startswith(_IN_PARTS):
                parts = range(self._parts(outcome))
                outcome = b"".join(self._client.read([self._key(f"part{i}") for i in parts]))
            failure = self._failure_in(outcome)
        except ValueError as error:
            raise damaged(error, self.name) from error
        if failure is None and not outcome.startswith(_SUCCESS + digest(header)):
            # Only when the members disagree on their number, and the others were complete without this one.
            failure = {"kind": "mismatch", "culprits": [[self.rank, self.rank]], "differences": {}}
        if failure is not None:
            raise self._explain(failure, what)
        self._client.delete([mine])
        return outcome[len(_SUCCESS) + DIGEST :]

    def _failure_in(self, outcome: bytes) -> dict[str, Any] | None:
        return read_failure(outcome[1:], self.size) if outcome.startswith(_FAILURE) else None

    def _parts(self, outcome: bytes) -> int:
        """Number of parts of an outcome, no more than the members' values can make."""
        count = int(outcome[1:20])
        if not 0 < count <= self.size * (MAX_VALUE + 4) // _PART + 2:
            raise ValueError(f"an outcome in {count} parts")
        return count

    def _await(self, end: float) -> bytes:
        """The outcome of this step, or b"" when there is none by `end`."""
        result = self._key("result")
        while not (outcome := self._client.peek(result)) and (left := end - time.monotonic()) > 0:
            if self._check_peers is not None:
                try:
                    self._check_peers()
                except CommError:
                    # Whoever has the outcome already may have gone on, and left.
                    if outcome := self._client.peek(result):
                        break
                    raise
            self._client.wait(result, min(left, _LOOK) if self._check_peers else left)
        return outcome

    def _complete(self, combine: Callable[[list[bytes]], bytes]) -> None:
        self._client.put(self._key("last"), str(self.rank).encode())
        missing, headers = self._roll_call()
        values = []
        if not missing:
            posts = self._client.read([self._key(str(r)) for r in range(self.size)])
            parts = [post[_NONCE:].split(b"\n", 1) for post in posts]
            headers, values = {r: part[0] for r, part in enumerate(parts)}, [part[1] for part in parts]
        # Members are missing in spite of the count where others think that there are more of them.
        if failure := compare(headers):
            self._fail(self._step, failure)
        elif not missing:
            self._succeed(_SUCCESS + digest(headers[0]) + combine(values))

    def _succeed(self, outcome: bytes) -> None:
        if len(outcome) > _PART:
            parts = [outcome[i : i + _PART] for i in range(0, len(outcome), _PART)]
            for i, part in enumerate(parts):
                self._client.put(self._key(f"part{i}"), part)
            outcome = _IN_PARTS + str(len(parts)).encode()
        if self._client.put_first(self._key("result"), outcome) != outcome:
            return
        if self._step > 0:
            self._erase(self._generation, self._step - 1)
            return
        self._advance(self._generation)
        before = self._generation - 1
        while before >= 0 and (step := self._client.peek(f"{self._base}/{before}/failed")):
            self._erase(before, int(step) - 1, posts=True)
            self._erase(before, int(step), posts=True)
            self._client.delete([f"{self._base}/{before}/failed", f"{self._base}/{before}/closed"])
            before -= 1

    def _fail(self, step: int, failure: dict[str, Any]) -> bytes:
        """Makes `failure` the outcome of a step, unless it has one; returns the one that it has now."""
        mine = _FAILURE + encode(failure)
        outcome = self._client.put_first(self._key("result", step), mine)
        if outcome == mine:
            self._client.put(f"{self._base}/{self._generation}/failed", str(step).encode())
            if step == 0:
                self._advance(self._generation)
        return outcome

    def _give_up(self) -> bytes:
        """At the deadline: the outcome, which is a failure unless there was one in the last moment."""
        grace = min(1.0 + self.size / 2000, 30.0)  # for the one elected to look, or the last comer to finish
        if self._client.add(self._key("abandon")) > 1 and (outcome := self._await(time.monotonic() + grace)):
            return outcome
        missing, headers = self._roll_call()
        stuck = not missing
        if stuck:
            if outcome := self._await(time.monotonic() + grace):
                return outcome
            last = self._client.peek(self._key("last"))
            missing = [int(last)] if last else []
            # Or the last to come thinks that there are more members, and waits for them.
            posts = self._client.read([self._key(str(r)) for r in range(self.size)])
            headers = {r: post[_NONCE:].split(b"\n", 1)[0] for r, post in enumerate(posts)}
        failure = {
            "kind": "timeout",
            "culprits": ranges_of(missing),
            "seconds": self._timeout,
            "stuck": stuck,
        }
        return self._fail(self._step, compare(headers) or failure)

    def _roll_call(self) -> tuple[list[int], dict[int, bytes]]:
        """Who has not posted, and the headers of those who have, save the ranges where nobody is missing."""
        missing, headers = [], {}
        for start in range(0, self.size, CHUNK):
            keys = {r: self._key(str(r)) for r in range(start, min(start + CHUNK, self.size))}
            if not self._client.present(list(keys.values())):
                posts = {r: self._client.peek(key) for r, key in keys.items()}
                missing += [r for r, post in posts.items() if not post]
                headers.update({r: post[_NONCE:].split(b"\n", 1)[0] for r, post in posts.items() if post})
        return missing, headers

    def _erase(self, generation: int, step: int, posts: bool = False) -> None:
        if step >= 0:
            key = f"{self._base}/{generation}/{step}"
            outcome = self._client.peek(f"{key}/result")
            parts = range(self._parts(outcome) if outcome.startswith(_IN_PARTS) else 0)
            names = ["result", "arrived", "abandon", "last", *(f"part{i}" for i in parts)]
            names += [str(r) for r in range(self.size)] if posts else []
            self._client.delete([f"{key}/{name}" for name in names])

    def _explain(self, failure: dict[str, Any], what: str) -> CommError | _Late:
        """What this member raises when the outcome is `failure`."""
        error = self._error(failure, what)
        if self._step == 0 and failure["kind"] == "timeout" and not failure["stuck"]:
            if self.labels[self.rank] in error.culprits:
                return _Late(error)
            if self._earlier is not None:
                earlier = self._error(self._earlier, what).message
                error.hint += f"; the others may have left after an earlier attempt: {earlier}"
        return error

    def _error(self, failure: dict[str, Any], what: str) -> CommError:
        return error_of(failure, what, self.name, self.rank, self.labels)
