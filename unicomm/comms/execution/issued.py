"""The issued operation: the one object behind whatever a user calls, from its place in the order to its end.

    engine.issue    hooks, number
    executor.run    records, profiler event, run
    finished        records, profiler row, hooks of the operation log

A collective or one-sided operation consists of one call; a batch of messages of one call per message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from unicomm.comms.execution.profiling.session import Span
from unicomm.comms.operations import recording
from unicomm.comms.operations.call import Call, OpArgs

from .member import Member

#: Peer of a receive that takes the next message of whatever rank.
ANY_RANK = -1

#: A message as the flight recorder numbers it: (is a send, peer, number within the pair).
Numbered = tuple[bool, int, int]


@dataclass(slots=True, eq=False)
class IssuedOperation:
    """One operation of a communicator on its way.

    Attributes:
        name: of the operation, as errors and hooks give it; "batch" for several messages.
        calls: validated arguments: one call, or one for each message of a batch. The executor clears them
            when tensors need not be kept alive any longer.
        run: moves the data, or puts the operation on the current stream. None once it is not needed.
        timeout: seconds until the operation fails.
        async_op: whether the caller waits with its Work.
        queued: the messages may run side by side with their neighbours (message_queue.py).
        checksum: whether its records get checksums (checksums.py).
        op_id: the number that hooks and records have in common, set when the operation is issued.
        seq: its number in the communicator, 0 before it is issued and where an operation has none.
        messages: (send, peer, number in the pair) of a send, receive or batch; empty for other operations.
        args: what hooks get, None when there are no hooks.
        records: in the flight recorder.
        spans: of the profiler.
        deadline: by the monotonic clock, set when the timeout begins to count.
        reached: whether the device has come to it.
        issued_ns: when it was issued, by the monotonic clock.
        before: the device's event before it.
        work: its handle, once an executor has taken it.
    """

    name: str
    calls: Sequence[Call]
    run: Callable[[], None] | None
    timeout: float
    async_op: bool
    queued: bool = False
    checksum: bool = False
    seq: int = 0
    args: OpArgs | None = None
    records: Sequence[int] = ()
    spans: Sequence[Span] = ()
    messages: Sequence[Numbered] = ()
    reached: bool = False
    work: Any = None
    op_id: int = field(init=False)
    deadline: float = field(init=False)
    issued_ns: int = field(init=False)
    before: Any = field(init=False)

    def arguments(self, numbers: Any) -> OpArgs:
        """What hooks see. `numbers` counts the communicator's operations; see `fast_path.NoFastPath`."""
        call = self.calls[0]
        if self.name == "batch":
            sent = [call.message for call in self.calls]
            return OpArgs("batch", self.op_id, async_op=self.async_op, timeout=self.timeout, messages=sent)
        if call.operation.is_message:
            if call.seq == 0 and call.peer != ANY_RANK:
                call.seq = numbers.pair_seq(call.peer, bool(call.inputs)) + 1
            return OpArgs.of(call, self.op_id, [call.message])
        if call.operation.is_collective and call.seq == 0:
            call.seq = numbers.seq + 1
        return OpArgs.of(call, self.op_id)

    def take_numbers(self, numbers: Any) -> None:
        """Numbers the operation: a collective in the communicator, a message within its pair of ranks."""
        if self.messages:  # by the native path that has begun it
            return
        first = self.calls[0]
        if first.operation.is_collective:
            self.seq = first.seq = numbers.next_seq()
        elif first.operation.is_message:
            messages = []
            for call in self.calls:
                send = bool(call.inputs)
                # A receive from any rank gets the number of its pair when its sender is known.
                call.seq = 0 if call.peer == ANY_RANK else int(numbers.next_pair_seq(call.peer, send))
                messages.append((send, call.peer, call.seq))
            self.seq, self.messages = call.seq, messages

    def begin(self, member: Member, started: bool) -> None:
        """Begins the operation's records. `started`: it runs in this very call."""
        if self.records:
            return
        begin, index, op_id = member.recorder.begin, member.recorder_index, self.op_id
        flags = recording.ASYNC if self.async_op else 0
        batch = 0
        if self.name == "batch":
            flags, batch = flags | recording.BATCH, op_id + 1
        records = []
        for call in self.calls:
            row, kind = call.operation, flags
            if row.is_message:
                kind |= recording.P2P if call.inputs else recording.P2P | recording.RECEIVE
            records.append(
                begin(
                    index,
                    row.code,
                    call.seq,
                    op_id,
                    call.inputs,
                    call.outputs,
                    0 if call.op is None else call.op.code,
                    call.root if row.rooted else call.peer,
                    kind,
                    call.timeout,
                    batch,
                    started,
                )
            )
        self.records = records
