"""Messages that order alone does not pair: receives from any rank, and tags."""

import pytest
import torch

from tests.flight_recorder.rings import ALL_REDUCE, META, RECV, SEND
from unicomm import _core
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.verdict import Verdict
from unicomm.flight_recorder.ring.reader import ASYNC, P2P, RECEIVE, read_ring
from unicomm.flight_recorder.table.load import load
from unicomm.flight_recorder.table.table import RUNNING


class Rank:
    """The ring of one of two ranks."""

    def __init__(self, folder, rank):
        self.ring = _core.Recorder(str(folder / f"r{rank}.ring"), META, rank, 2, 64)
        self.comm = self.ring.add_comm("c", "shm", "u", "0-1", rank, 2)
        self.other = 1 - rank

    def sends(self, seq, over=True, size=2):
        return self._begin(SEND, seq, self.other, P2P, over, size)

    def receives(self, seq, over=True, peer=None, size=2):
        return self._begin(RECV, seq, self.other if peer is None else peer, P2P | RECEIVE, over, size)

    def _begin(self, op, seq, peer, flags, over, size):
        tensors = [torch.ones(size)]
        record = self.ring.begin(self.comm, op, seq, seq, tensors, tensors, 0, peer, flags)
        if over:
            self.ring.finish(record)
        return record

    def takes(self, receive, number):
        """Ends a receive from any rank, whose sender is known now."""
        self.ring.set_sender(receive, self.other, number)
        self.ring.finish(receive)


@pytest.mark.parametrize("before", [0, 200])
def test_the_first_message_went_to_the_receive_from_any(tmp_path, before):
    """Rank 0 receives from any rank, then from rank 1, which has sent one message only.

    `before`: operations that the ring has held; 200 are more than fit.
    """
    taker, sender = Rank(tmp_path, 0), Rank(tmp_path, 1)
    for seq in range(1, before + 1):
        for rank in (taker, sender):
            rank.ring.finish(rank.ring.begin(rank.comm, ALL_REDUCE, seq, seq, [], []))
    first = taker.receives(0, over=False, peer=-1)
    taker.receives(1, over=False)
    taker.takes(first, 2)
    sender.sends(1)
    main = analyze(load([tmp_path]), stuck_after=0).main
    assert (main.verdict, main.culprits) == (Verdict.UNMATCHED_P2P, [1])
    assert "but rank 1 never issued the send for it" in main.sentence
    receives = read_ring(tmp_path / "r0.ring").records[-2:]
    assert receives["seq"].tolist() == [1, 2]  # the first one had been numbered 2


def test_a_receive_is_late_for_a_message_that_was_sent(tmp_path):
    """Its send has completed, as small ones do; the next send has another size, and no receive yet."""
    taker, sender = Rank(tmp_path, 0), Rank(tmp_path, 1)
    taker.takes(taker.receives(0, over=False, peer=-1), 1)
    sender.sends(1)
    sender.sends(2, size=4)
    taker.receives(2, over=False, size=4)
    sender.sends(3, over=False, size=9)
    found = analyze(load([tmp_path]), stuck_after=0).findings
    assert Verdict.P2P_SIZE_MISMATCH not in [one.verdict for one in found]


def test_a_receive_that_is_left_open_hangs_nobody(tmp_path):
    """Rank 0 would get a message that tells it to stop. It works meanwhile, in more operations than fit."""
    listener, _ = Rank(tmp_path, 0), Rank(tmp_path, 1)
    listener.receives(1, over=False)
    for seq in range(1, 200):
        record = listener.ring.begin(listener.comm, ALL_REDUCE, seq, seq, [], [])
        listener.ring.finish(record)
    table = load([tmp_path])
    table.flags[0] |= ASYNC
    table.created_ns[0] -= 60_000_000_000
    source = table.source_of[0]
    source.process, source.as_of_ns = RUNNING, int(table.completed_ns[source.end - 1]) + 1_000_000
    assert analyze(table, stuck_after=5).main.verdict is Verdict.GOOD
    table.thread[0] = len(table.threads)  # a thread that waits beside one that works
    table.threads.append("another")
    assert analyze(table, stuck_after=5).main.culprits == [1]
    table.thread[0] = table.thread[1]
    source.as_of_ns += 60_000_000_000  # nor does it work any more
    main = analyze(table, stuck_after=5).main
    assert (main.verdict, main.culprits) == (Verdict.UNMATCHED_P2P, [1])


def test_unfinished_messages_are_pairs(tmp_path):
    """Two messages have come; of the next ones, both sides wait for the same one."""
    taker, sender = Rank(tmp_path, 0), Rank(tmp_path, 1)
    first = taker.receives(0, over=False, peer=-1)
    taker.receives(1)
    taker.takes(first, 2)
    for seq in (1, 2):
        sender.sends(seq)
    sender.sends(3, over=False)
    taker.receives(3, over=False)
    main = analyze(load([tmp_path]), stuck_after=0).main
    assert main.verdict is Verdict.NEVER_FINISHED
    assert sorted({*main.culprits, *main.victims}) == [0, 1]


def test_sizes_in_another_order_are_told_apart_by_tags(tmp_path):
    """Records have no tags. A message that does not fit its receive fails; these have completed."""
    taker, sender = Rank(tmp_path, 0), Rank(tmp_path, 1)
    for seq, (size, other) in enumerate(((8, 4), (4, 8)), 1):
        sender.sends(seq, size=size)
        taker.receives(seq, size=other)
    assert analyze(load([tmp_path]), stuck_after=0).main.verdict is Verdict.GOOD
    sender.sends(3, size=8)
    taker.receives(3, size=4)
    main = analyze(load([tmp_path]), stuck_after=0).main
    assert main.verdict is Verdict.P2P_SIZE_MISMATCH
