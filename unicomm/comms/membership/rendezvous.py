"""Rendezvous: the members of a new communicator meet and agree, over any `torch.distributed` store.

All members call `meet` with the same name. It returns when all have come and agree on `hello`, or raises the
same error on every member that has come. Only the members use the store, so groups may meet in any order.

The protocol
------------
Keys live under ``unicomm/<name>/<group>/``, where <group> is ``world`` without labels and a hash
of the labels otherwise. ``generation`` there counts the meetings that are decided; a meeting uses the keys
under ``<generation>/``. It is a sequence of steps, one for each collective call, numbered from 0 (the meeting
itself). Every step works the same way, under ``<generation>/<step>/``:

1. Each member posts its value under its rank, by compare-and-set, so that a second process with the same
   rank is noticed at once. Then it adds 1 to ``arrived``.
2. The member that completes ``arrived`` is the last one. It reads all posts, compares their headers and puts
   the outcome into ``result``, for which all the others wait.
3. A member whose deadline passes, that is interrupted, or that finds a reason why the step cannot succeed
   (meeting_faults.py, `check_peers`), puts a failure into ``result``. ``abandon`` elects the member that
   finds out who is missing, so that a large job does not overload the store. If all have come, it puts
   ``question``, and the members that answer by ``here<rank>`` are not to blame.

``result`` is written by compare-and-set only: the first outcome stands and all members take it, also a member
that wanted to write another one. So no member fails while the others succeed, and none succeeds alone. An
outcome in step 0 ends the generation: its writer increments ``generation``. A member that finds a decided
generation increments it too, in case the writer has died in between. Hence a late member never meets the
posts of a failed attempt. If members were missing in that attempt, the late member starts the next attempt,
which members that retry join. Any other failure is raised on the late member at once; it posts in the old
generation, so that it raises this failure only once. A member for which the store failed in the middle of a
meeting leaves its post behind. At its next attempt it replaces that post, if there is no outcome yet.

Cleaning. A member deletes its post after a success, when the last member has read it; that of step 0 after
the next step, because a member that retries is counted twice there, so that two may take themselves for the
last one, and the slower of them still reads. The shared keys of a step are deleted when all members have
posted in the next step, because all have read the outcome then; those of the final step are deleted with the
last ``closed``. After a failure no member knows which ones still read,
so the keys stay, marked by ``failed``, until the next success under this name: by then every member has left
the failed attempt.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from unicomm.c10d.compat import Store, base_store
from unicomm.comms.errors import (
    AbortedError,
    CommError,
    InvalidArgumentError,
    NotReadyError,
)
from unicomm.comms.failures.first_cause import await_cause
from unicomm.comms.failures.store_client import CHUNK, StoreClient, is_store_failure
from unicomm.comms.failures.store_requests import serves

from .meeting_faults import MeetingFaults, Waiting
from .processes import Process
from .rendezvous_parts import (
    DIGEST,
    check_meeting,
    compare,
    damaged,
    describe,
    digest,
    encode,
    error_of,
    grow,
    leaving,
    pack,
    ranges_of,
    read_failure,
    shrink,
    unpack,
)

MAX_VALUE = 1 << 20  # bytes that one member may contribute to a step: these are addresses, not tensors
_LOOK = 0.2  # seconds between two looks at the peers
_PART = 4 << 20  # TCPStore takes values of up to 8 MiB; longer outcomes go in parts
_UID = 16  # characters
_NONCE = 16  # characters before a post's header, which make each post unique
_SUCCESS, _IN_PARTS, _FAILURE = b"+", b"*", b"-"  # how outcomes begin

#: Nonces of this process's posts in meetings whose outcome it has not read, because the store failed.
_left_behind: set[bytes] = set()
os.register_at_fork(after_in_child=_left_behind.clear)


def _first_outcome(processes: list[bytes]) -> bytes:
    """The outcome of the meeting itself: its uid, and the members' processes."""
    uid = secrets.token_hex(_UID // 2).encode()
    return uid + shrink(pack(processes)) if len(processes) > 1 else uid


class _Late(Exception):
    """The attempt had failed before this member came, because it was missing."""

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
    """Meets the other members. All of them call it, and no other process.

    Args:
        store: any store that the members share; None is enough for a single member.
        name: of the meeting, the same on all members. It may be used again, also after a failure.
        rank, size: this member's number, and the number of members.
        timeout: seconds for the meeting and all calls on the result.
        hello: JSON values on which the members have to agree; compared key by key, as the size is.
        labels: the members' global ranks in order of rank, the same on all members. Groups with different
            labels do not disturb each other, whatever their names. Without labels, the members are all ranks.
        check_peers: called several times a second while this waits; an error that it raises ends the meeting.

    Returns when all members have come and agree. Raises on all members that came: `CommTimeoutError` naming
    the others, `MismatchError` naming the minority, `PeerLostError` naming a member that was interrupted, or
    `BackendError` when the store fails. Raises `InvalidArgumentError` before anything is sent.
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

    The members call its methods collectively, in the same order, each from one thread at a time. All calls
    together have the timeout that was given to `meet`. They raise `CommTimeoutError` when members do not
    come, `MismatchError` when members call different methods, `PeerLostError` when a member has left, and
    `BackendError` when the store fails. Every member raises the error, and later calls raise the same one.
    As a context manager it calls `abort` when the block raises, and then `close`.

    Attributes:
        name: as given to `meet`.
        rank, size: this member's number, and the number of members.
        labels: the members' global ranks.
        uid: 16 hexadecimal digits, the same on all members and different for every meeting.
    """

    _client: StoreClient  # only when there are others
    _faults: MeetingFaults

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
        self._first_post: list[str] = []  # the key of this member's post in step 0, while it is there
        self._answers: list[str] = []  # keys by which this member has said in this step that it is here
        self._process = Process.this(size > 1 and serves(base_store(store)))
        if store is not None and size > 1:
            self._client = StoreClient(store, name, size, limit, check_peers)

    def remaining(self) -> float:
        """Seconds that are left of the timeout; 0 when it has passed."""
        return max(0.0, self._deadline - time.monotonic())

    def exchange(self, tag: str, value: bytes) -> list[bytes]:
        """All-gathers a value of up to `MAX_VALUE` bytes. Returns all values, in order of rank.

        `tag` names the exchange: the members compare it, and errors show it.
        """
        header = {"call": "exchange", "tag": tag}
        body = self._run(header, value, lambda all_: shrink(pack(all_)), f"reach exchange '{tag}'")
        with self._reading():
            return unpack(grow(body, self.size * (MAX_VALUE + 4)), self.size)

    def broadcast(self, tag: str, value: bytes | None, root: int = 0) -> bytes:
        """Returns member `root`'s value (up to `MAX_VALUE` bytes) on all members; other values are ignored.

        It returns when all members have come, as `exchange` does.
        """
        if not 0 <= root < self.size or (value is None and self.rank == root):
            raise InvalidArgumentError(
                f"broadcast '{tag}' from root {root} of {self.size} with value={value!r}",
                comm=self.name,
                rank=self.rank,
                hint="root is one of the members, and passes the value",
            )
        mine = value if self.rank == root and value is not None else b""
        header = {"call": "broadcast", "tag": tag, "root": root}
        return self._run(header, mine, lambda values: values[root], f"reach broadcast '{tag}'")

    def check(self) -> None:
        """Raises if a member has left, or if `check_peers` raises. Does not wait.

        For members that connect to each other by other means between two collective calls.
        """
        if self._failure is not None:
            raise self._failure
        if self.size == 1:
            return
        if self._check_peers is not None:
            self._check_peers()
        outcome = self._client.peek(self._key("result"))
        if not outcome and (dead := self._faults.dead()) is not None:
            outcome = self._fail(self._step, dead)
        with self._reading():
            failure = self._failure_in(outcome)
        if failure is not None:
            self._failure = self._error(failure, "connect")
            raise self._failure

    def abort(self, reason: str, cause: BaseException | None = None) -> None:
        """Leaves early: the next call of each other member raises an error at once.

        That is a `PeerLostError` with `reason`; or, if other ranks made this member leave, as they did not
        come to a meeting of some members, are gone, or have aborted, the same as the `cause`, with their
        global ranks.

        Only the member that cannot go on calls it. Without effect after an error or `close`.
        """
        if self._failure is not None or self._closed:
            return
        self._failure = AbortedError(f"this member left: {reason}", comm=self.name, rank=self.rank)
        if self.size == 1:
            return
        with contextlib.suppress(CommError):
            failure = leaving(self.rank, self.labels[self.rank], reason, cause)
            # If this step has succeeded meanwhile, the others go on to the next step and must not wait there.
            for step in (self._step, self._step + 1):
                if self._fail(step, failure).startswith(_FAILURE):
                    break

    def close(self) -> None:
        """Ends this member's part. Does not wait; the last member to close cleans the store.

        Never raises when the store is gone. Every member calls it, also after an error.
        """
        done, self._closed = self._closed or self.size == 1, True
        if done:
            return
        with contextlib.suppress(CommError):
            # A failed meeting may still have readers: only the next success removes its keys.
            here = f"{self._base}/{self._generation}"
            if self.uid and self._client.add(f"{here}/closed") == self.size:
                failed = bool(self._client.peek(f"{here}/failed"))
                for step in range(self._step - 1, self._step + (2 if failed else 0)):
                    self._erase(self._generation, step, posts=failed or step == 0)
                self._client.delete([f"{here}/closed", f"{here}/failed"])

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.abort(describe(error), error)
        self.close()

    def _join(self, hello: Mapping[str, Any]) -> None:
        header = {"size": self.size, **hello}
        encode(header)  # raises before anything is sent
        while not self.uid:
            self._generation = 0 if self.size == 1 else self._open_generation()
            if self.size > 1:
                at = f"{self._base}/{self._generation}"
                self._faults = MeetingFaults(
                    *(self._client, self.name, at, self.rank, self.labels, self._process)
                )
            try:
                body = self._run(header, self._process.pack(), _first_outcome, "arrive")
            except _Late as late:
                if self.remaining() <= 0:
                    raise late.error from None
            else:
                self._have_met(body)

    def _have_met(self, body: bytes) -> None:
        if self.size > 1:
            with self._reading():
                sizes = self.size * (len(self._process.pack()) + 4)
                told = unpack(grow(body[_UID:], sizes), self.size)
                self._faults.known = dict(enumerate(map(Process.read, told)))
            self._faults.close()
            holder = [r for r, process in self._faults.known.items() if process.holds_store]
            if len(holder) == 1:
                self._client.set_host(self.labels[holder[0]])
        self.uid = body[:_UID].decode()

    def _open_generation(self) -> int:
        """The first generation without an outcome. Raises the outcome of the generation before, if needed."""
        while True:
            generation = self._current_generation()
            if self._client.peek(f"{self._base}/{generation}/0/result"):
                self._advance(generation)
            elif self._current_generation() == generation:  # else it was decided, and its outcome is erased
                break
        if generation == 0:
            return generation
        before = f"{self._base}/{generation - 1}/0"
        outcome = self._client.peek(f"{before}/result")
        with self._reading():
            self._earlier = self._failure_in(outcome)
        if self._earlier is None or self._earlier["kind"] == "timeout":
            return generation
        if self._client.put_first(f"{before}/{self.rank}", self._nonce) == self._nonce:
            if self._earlier.get("peers"):
                self._await_cause()
            raise self._error(self._earlier, "arrive")
        return generation

    def _current_generation(self) -> int:
        return int(self._client.put_first(f"{self._base}/generation", b"0"))

    def _advance(self, generation: int) -> None:
        # Without effect if another member has done it.
        self._client.replace(f"{self._base}/generation", b"%d" % generation, b"%d" % (generation + 1))

    def _key(self, name: str, step: int | None = None) -> str:
        return f"{self._base}/{self._generation}/{self._step if step is None else step}/{name}"

    def _run(
        self, header: dict[str, Any], value: bytes, combine: Callable[[list[bytes]], bytes], what: str
    ) -> bytes:
        """One step: posts `value`, and returns what `combine` makes of all values on the last member."""
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
                hint=f"a member may pass up to {MAX_VALUE} bytes; send larger data by the communicator",
            )
        if self.size == 1:
            return combine([value])
        try:
            body = self._play(encoded, value, combine, what)
        except CommError as error:
            self._failure = error
            if self._step == 0 and is_store_failure(error):
                _left_behind.add(self._nonce)
            raise
        except BaseException as error:
            if not isinstance(error, _Late):
                self.abort(describe(error))  # e.g. Ctrl-C: then the others need not wait for this member
            raise
        self._step += 1
        return body

    def _play(self, header: bytes, value: bytes, combine: Callable[[list[bytes]], bytes], what: str) -> bytes:
        mine, post = self._key(str(self.rank)), self._nonce + header + b"\n" + value
        found = self._client.put_first(mine, post)
        if found[:_NONCE] in _left_behind:  # of this member's last attempt, which has no outcome yet
            self._client.replace(mine, found, post)
            _left_behind.discard(found[:_NONCE])
            found = post
        if found != post:
            self._fail(self._step, {"kind": "twice", "culprits": [[self.rank, self.rank]]})
        elif self._client.add(self._key("arrived")) >= self.size:
            self._complete(combine)
        outcome = self._await(self._deadline, header) or self._give_up(header)
        with self._reading():
            if outcome.startswith(_IN_PARTS):
                parts = range(self._parts(outcome))
                outcome = b"".join(self._client.read([self._key(f"part{i}") for i in parts]))
            failure = self._failure_in(outcome)
        if failure is None and not outcome.startswith(_SUCCESS + digest(header)):
            # Only if the members disagree on their number, and the others were complete without this one.
            failure = {"kind": "mismatch", "culprits": [[self.rank, self.rank]], "differences": {}}
        if failure is not None:
            if failure.get("peers"):
                self._await_cause()
            raise self._explain(failure, what)
        over, self._answers = [*self._first_post, mine, *self._answers], []
        self._first_post = [over.pop(0)] if self._step == 0 else []  # see "Cleaning"
        # The member that holds the store may have read the outcome, gone on, and ended the store.
        with contextlib.suppress(CommError):
            self._client.delete(over)
        return outcome[len(_SUCCESS) + DIGEST :]

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Around reading what members have put into the store: `BackendError` if no member wrote it."""
        try:
            yield
        except ValueError as error:
            raise damaged(error, self.name) from error

    def _failure_in(self, outcome: bytes) -> dict[str, Any] | None:
        return read_failure(outcome[1:], self.size) if outcome.startswith(_FAILURE) else None

    def _parts(self, outcome: bytes) -> int:
        """The number of parts of an outcome, at most what the members' values can fill."""
        count = int(outcome[1:20])
        if not 0 < count <= self.size * (MAX_VALUE + 4) // _PART + 2:
            raise ValueError(f"an outcome in {count} parts")
        return count

    def _await(self, end: float, header: bytes) -> bytes:
        """The outcome of this step, or b"" if there is none by `end`."""
        result = self._key("result")
        look = time.monotonic() + self._faults.interval
        with Waiting():
            while not (outcome := self._client.peek(result)) and (left := end - time.monotonic()) > 0:
                if self._check_peers is not None:
                    try:
                        self._check_peers()
                    except CommError as error:
                        # A member that has the outcome already may have gone on, and left.
                        if outcome := self._tell_of_peers(error):
                            break
                        raise
                if time.monotonic() >= look:
                    look = time.monotonic() + self._faults.interval
                    if failure := self._look(header):
                        return self._fail(self._step, failure)
                pause = min(left, look - time.monotonic())
                self._client.wait(result, min(pause, _LOOK) if self._check_peers else pause)
        return outcome

    def _tell_of_peers(self, error: CommError) -> bytes:
        """Fails this step because of an error of `check_peers`. Returns another outcome if there was one."""
        failure = leaving(self.rank, self.labels[self.rank], describe(error), error) | {"peers": True}
        try:
            outcome = self._fail(self._step, failure)
        except CommError:
            if not self._client.explains(error):
                raise
            return b""  # the store may be gone with a peer
        return b"" if outcome == _FAILURE + encode(failure) else outcome

    def _await_cause(self) -> None:
        """Raises what `check_peers` finds, when another member has left because of what it has found."""
        if self._check_peers is not None:
            await_cause(self._check_peers, self._deadline - time.monotonic())

    def _look(self, header: bytes) -> dict[str, Any] | None:
        """Looks for a reason why this step cannot succeed, and answers the member that asks who is here."""
        if self._client.peek(self._key("question")):
            self._answers = [self._key(f"here{self.rank}")]
            self._client.put(self._answers[0], b"1")
        if self._step > 0:
            return self._faults.dead()
        with self._reading():
            return self._faults.look(header, self._post_of, lambda: compare(self._roll_call()[1]))

    def _post_of(self, rank: int) -> tuple[bytes, bytes] | None:
        post = self._client.peek(self._key(str(rank)))
        header, _, value = post[_NONCE:].partition(b"\n")
        return (header, value) if header else None

    def _complete(self, combine: Callable[[list[bytes]], bytes]) -> None:
        self._client.put(self._key("last"), str(self.rank).encode())
        missing, headers = self._roll_call()
        values: list[bytes] = []
        if not missing:
            headers, values = self._posts()
            if not all(headers.values()):
                return  # a member has posted that it has read the outcome, see `_open_generation`
        # If others expect more members than this one, members are missing although the count is complete.
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
            with contextlib.suppress(CommError):  # as in `_play`
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
        """Makes `failure` the outcome of a step unless it has one. Returns the outcome of the step."""
        mine = _FAILURE + encode(failure)
        outcome = self._client.put_first(self._key("result", step), mine)
        if outcome == mine:
            self._client.put(f"{self._base}/{self._generation}/failed", str(step).encode())
            if step == 0:
                self._advance(self._generation)
        return outcome

    def _give_up(self, header: bytes) -> bytes:
        """At the deadline: the outcome, a failure unless another one came at the last moment."""
        # For the elected member to look, or the last member to finish.
        grace = min(1.0 + self.size / 2000, 30.0) + self._faults.interval
        elected = self._client.add(self._key("abandon")) == 1
        if not elected and (outcome := self._await(time.monotonic() + grace, header)):
            return outcome
        missing, headers = self._roll_call()
        stuck = not missing
        if stuck:
            self._client.put(self._key("question"), b"1")
            if outcome := self._await(time.monotonic() + grace, header):
                self._client.delete([self._key("question")])
                return outcome
            missing = self._unanswered()
            # Or the last member expects more members, and waits for them. Posts go when the step succeeds.
            posts = {r: self._post_of(r) for r in range(self.size)}
            headers = {r: post[0] for r, post in posts.items() if post is not None}
        failure = {
            "kind": "timeout",
            "culprits": ranges_of(missing),
            "seconds": self._timeout,
            "stuck": stuck,
        }
        return self._fail(self._step, compare(headers) or failure)

    def _unanswered(self) -> list[int]:
        """Members that have come and have not answered the question who is here; else the last to come."""
        others = [r for r in range(self.size) if r != self.rank]
        silent = [r for r in others if not self._client.peek(self._key(f"here{r}"))]
        if silent:
            return silent
        last = self._client.peek(self._key("last"))
        return [int(last)] if last else []

    def _posts(self) -> tuple[dict[int, bytes], list[bytes]]:
        """The headers and the values of all members. Called when all of them have posted theirs."""
        posts = self._client.read([self._key(str(r)) for r in range(self.size)])
        parts = [post[_NONCE:].partition(b"\n") for post in posts]
        return {r: part[0] for r, part in enumerate(parts)}, [part[2] for part in parts]

    def _roll_call(self) -> tuple[list[int], dict[int, bytes]]:
        """Members that have not posted; and the headers of the others, without ranges that are complete."""
        missing, headers = [], {}
        for start in range(0, self.size, CHUNK):
            keys = {r: self._key(str(r)) for r in range(start, min(start + CHUNK, self.size))}
            if not self._client.present(list(keys.values())):
                posts = {r: self._client.peek(key) for r, key in keys.items()}
                missing += [r for r, post in posts.items() if not post]
                headers.update({r: post[_NONCE:].partition(b"\n")[0] for r, post in posts.items()})
        return missing, {r: header for r, header in headers.items() if header}

    def _erase(self, generation: int, step: int, posts: bool = False) -> None:
        if step >= 0:
            key = f"{self._base}/{generation}/{step}"
            outcome = self._client.peek(f"{key}/result")
            parts = range(self._parts(outcome) if outcome.startswith(_IN_PARTS) else 0)
            names = ["result", "arrived", "abandon", "last", *(f"part{i}" for i in parts)]
            if posts:
                names += ["question", *(f"{kind}{r}" for kind in ("", "here") for r in range(self.size))]
            self._client.delete([f"{key}/{name}" for name in names])

    def _explain(self, failure: dict[str, Any], what: str) -> CommError | _Late:
        """The error that this member raises when the outcome is `failure`."""
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
