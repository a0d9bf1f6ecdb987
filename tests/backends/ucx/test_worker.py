"""Waits of a UCX worker: sends it reports as complete have left, and it never sleeps with data to send."""

import threading

import pytest
import torch

from tests.ucx_here import needs_ucx
from unicomm import _core
from unicomm.backends.ucx.library import open_library
from unicomm.comms.operations.dtypes import code_of
from unicomm.comms.operations.reduction import RedOpType

pytestmark = needs_ucx

# Small buffers of the system and copied sends, which UCX completes while the end of one is in the worker.
_SETTINGS = [
    *(("TLS", "tcp", True), ("NET_DEVICES", "lo", True), ("RNDV_THRESH", "inf", True)),
    *(("ZCOPY_THRESH", "inf", True), ("TCP_SNDBUF", "32k", True), ("TCP_RCVBUF", "32k", True)),
]
_BYTES = 3000  # of a message
_MOST = 2000  # messages, more than the system takes
_WITHIN = 10.0  # seconds


@pytest.fixture
def workers():
    """Two connected workers."""
    pair = [_core.UcxWorker(open_library(), rank, 2, _SETTINGS, 0.0001) for rank in range(2)]
    for worker in pair:
        worker.connect([one.address for one in pair])
    other = threading.Thread(target=pair[1].greet, args=(_WITHIN,))
    other.start()
    assert pair[0].greet(_WITHIN)
    other.join()
    yield pair
    for worker in pair:
        worker.drop()


def _receives(worker, number):
    out = torch.zeros(_BYTES, dtype=torch.uint8)
    receiving = _core.TransportMessages(worker)
    receiving.add(number, False, 0, out.data_ptr(), _BYTES, 0)
    return receiving.wait(_WITHIN, True) == [(number, 0, _BYTES)] and bool((out == number % 251).all())


def test_a_send_that_is_told_has_left(workers):
    """Also by a wait that ended early, while the end of the message did not fit into the system."""
    sender, receiver = workers
    kept, told = [], 0
    for number in range(_MOST):
        kept.append(torch.full((_BYTES,), number % 251, dtype=torch.uint8))
        sending = _core.TransportMessages(sender)
        sending.add(number, True, 1, kept[-1].data_ptr(), _BYTES, 0)
        if not sending.wait(0.0, False) and not sending.wait(0.02, False):
            break  # this is the message whose end did not fit
        told += 1
    assert 0 < told < _MOST - 1
    for number in range(told):  # the sender's worker is not called meanwhile
        assert _receives(receiver, number)
    rest = threading.Thread(target=sending.wait, args=(_WITHIN, True))
    rest.start()
    assert _receives(receiver, told)
    rest.join()


def test_who_waits_leaves_before_the_worker_ends(workers):
    _, receiver = workers
    out = torch.zeros(_BYTES, dtype=torch.uint8)
    receiving = _core.TransportMessages(receiver)
    receiving.add(0, False, 0, out.data_ptr(), _BYTES, 0)
    said = []
    waiting = threading.Thread(target=lambda: said.append(receiving.wait(_WITHIN, False)))
    waiting.start()
    assert receiver.drop()
    waiting.join()
    assert said == [None]
    assert receiving.wait(0.0, False) is None
    with pytest.raises(RuntimeError, match="has ended"):
        receiving.add(1, False, 0, out.data_ptr(), _BYTES, 0)


def test_a_message_that_was_received_in_part_does_not_keep_the_worker(workers):
    """Its sender is gone in the middle; UCX neither ends nor cancels such a receive."""
    sender, receiver = workers
    data, out = torch.ones(1 << 20, dtype=torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8)
    sending, receiving = _core.TransportMessages(sender), _core.TransportMessages(receiver)
    receiving.add(0, False, 0, out.data_ptr(), out.nbytes, 0)
    sending.add(0, True, 1, data.data_ptr(), data.nbytes, 0)
    while not out.any():
        assert not sending.wait(0.01, False)
        receiving.wait(0.01, False)
    assert not out.all()
    receiver.stop()
    assert receiver.drop()
    sender.stop()
    sender.drop()


def test_nobody_sleeps_while_there_is_something_to_send(workers):
    """UCX signals no event for a send that completes at once. Sleeping after every four would take 100 s."""
    chunk, chunks = 16, 4096
    data = torch.arange(chunk * chunks // 4, dtype=torch.float32)
    out = torch.zeros_like(data)

    def reduce(rank):
        all_of_it, nothing = (data.data_ptr(), data.nbytes), (data.data_ptr(), 0)
        shares = [nothing, all_of_it]  # rank 1 gets everything, rank 0 nothing that could wake it
        workers[rank].reduce(
            shares, out.data_ptr(), code_of(torch.float32), int(RedOpType.SUM), [], [], [], chunk
        )

    ranks = [threading.Thread(target=reduce, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(2 * _WITHIN)
        assert not rank.is_alive()
    assert torch.equal(out, 2 * data)
