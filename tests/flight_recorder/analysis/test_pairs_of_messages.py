"""Messages that order alone does not pair: receives from any rank, and tags."""

import torch

from tests.flight_recorder.rings import META, RECV, SEND
from unicomm import _core
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.verdict import Verdict
from unicomm.flight_recorder.ring.reader import P2P, RECEIVE
from unicomm.flight_recorder.table.load import load


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


def test_the_first_message_went_to_the_receive_from_any(tmp_path):
    """Rank 0 receives from any rank, then from rank 1, which has sent one message only."""
    taker, sender = Rank(tmp_path, 0), Rank(tmp_path, 1)
    taker.receives(0, peer=-1)
    taker.receives(1, over=False)
    sender.sends(1)
    main = analyze(load([tmp_path]), stuck_after=0).main
    assert (main.verdict, main.culprits) == (Verdict.UNMATCHED_P2P, [1])
    assert "but rank 1 never issued the send for it" in main.sentence


def test_unfinished_messages_are_pairs(tmp_path):
    """Two messages have come; of the next ones, both sides wait for the same one."""
    taker, sender = Rank(tmp_path, 0), Rank(tmp_path, 1)
    taker.receives(0, peer=-1)
    taker.receives(1)
    for seq in (1, 2):
        sender.sends(seq)
    sender.sends(3, over=False)
    taker.receives(2, over=False)
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
