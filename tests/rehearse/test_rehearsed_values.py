"""Values that a rehearsal makes up: each operation's meaning, as if all ranks held equal data."""

from collections import Counter

import pytest
import torch

from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.reduction import ReduceOp
from unicomm.comms.operations.table import OPERATIONS
from unicomm.rehearse.values import made_up
from unicomm.rehearse.values.notes import Notes
from unicomm.rehearse.values.reads import Received, mark

SIZE, RANK = 4, 1


@pytest.fixture
def notes(tmp_path):
    return Notes(tmp_path, RANK, range(SIZE), 5.0, -1).of_group("world", list(range(SIZE)))


def call(name, inputs=(), outputs=(), **more):
    splits = {key: more.pop(key) for key in ("in_splits", "out_splits") if key in more}
    made = Call(OPERATIONS[name], list(inputs), list(outputs), **more)
    for key, value in splits.items():
        setattr(made, key, value)
    made.seq = 1
    return made


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOp.SUM, [8, 12]),
        (ReduceOp.AVG, [2, 3]),
        (ReduceOp.MAX, [2, 3]),
        (ReduceOp.PRODUCT, [16, 81]),
        (ReduceOp.BXOR, [0, 0]),
        (ReduceOp.PREMUL_SUM(2), [16, 24]),
    ],
)
def test_reductions_of_equal_values(notes, op, expected):
    x = torch.tensor([2, 3])
    made_up.fill(call("all_reduce", [x], [x], op=op, dtype=x.dtype), RANK, SIZE, notes)
    assert x.tolist() == expected


def test_reduce_writes_the_roots_tensor_only(notes):
    for root, expected in ((RANK, 4.0), (0, 1.0)):
        x = torch.ones(1)
        made_up.fill(call("reduce", [x], [x], op=ReduceOp.SUM, root=root), RANK, SIZE, notes)
        assert x.item() == expected


def test_scattered_and_gathered_parts(notes):
    whole, part = torch.arange(8.0), torch.zeros(2)
    scattered = call("reduce_scatter_single", [whole], [part], op=ReduceOp.SUM)
    made_up.fill(scattered, RANK, SIZE, notes)
    assert part.tolist() == [8.0, 12.0]
    out = torch.zeros(12)
    made_up.fill(call("all_gather_single", [torch.arange(3.0)], [out]), RANK, SIZE, notes)
    assert out.tolist() == [0.0, 1.0, 2.0] * 4
    out = torch.zeros(8)
    made_up.fill(call("all_to_all_single", [whole], [out]), RANK, SIZE, notes)
    assert out.tolist() == [2.0, 3.0] * 4


def test_uneven_parts_repeat_the_own_part(notes):
    source, out = torch.tensor([1.0, 5.0, 6.0, 9.0]), torch.zeros(7)
    exchange = call("all_to_all_v_single", [source], [out], in_splits=[1, 2, 1, 0], out_splits=[2, 2, 3, 0])
    made_up.fill(exchange, RANK, SIZE, notes)
    assert out.tolist() == [5.0, 6.0, 5.0, 6.0, 5.0, 6.0, 5.0]


def test_a_broadcast_of_a_rank_that_ran_before_has_its_value(tmp_path):
    def of(rank):
        return Notes(tmp_path, rank, range(SIZE), 5.0, -1).of_group("world", list(range(SIZE)))

    x = torch.tensor([7, 8])
    made_up.fill(call("broadcast", [x], [x], root=0), 0, SIZE, of(0))
    y = torch.tensor([0, 0])
    made_up.fill(call("broadcast", [], [y], root=0), RANK, SIZE, of(RANK))
    assert y.tolist() == [7, 8]
    z = torch.tensor([1, 2])
    later = call("broadcast", [], [z], root=3)  # has not run yet: the own value stays
    made_up.fill(later, RANK, SIZE, of(RANK))
    assert z.tolist() == [1, 2]


def test_messages_are_noted_or_finite(tmp_path):
    def of(rank):
        return Notes(tmp_path, rank, range(SIZE), 5.0, -1).of_group("world", list(range(SIZE)))

    made_up.exchange([Message(True, RANK, torch.tensor([3, 4]))], 0, of(0))
    (tmp_path / "ended-0").touch()
    got, mine = torch.zeros(2, dtype=torch.int64), of(RANK)
    made_up.exchange([Message(False, 0, got)], RANK, mine)
    assert got.tolist() == [3, 4]
    other = torch.full((3, 3), float("nan"))
    made_up.exchange([Message(False, 0, other)], RANK, mine)
    assert torch.isfinite(other).all()
    assert other.std() > 0


def test_reads_of_received_values_are_found():
    with Received() as reads:
        got, own = torch.ones(3), torch.ones(3)
        mark([got])
        assert own.sum() > 0  # not received
        if (got * 2).sum() > 3:
            got.tolist()
    lines = Counter(what for _, _, what, _ in reads.found)
    assert lines == {"a branch": 1, "numbers": 1}
    assert {file for file, *_ in reads.found} == {__file__}
