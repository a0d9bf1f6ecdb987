"""Values that a small run has received, in a larger rehearsal."""

import json

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from unicomm.launch.cli import app
from unicomm.rehearse.rehearsal import rehearse

pytestmark = pytest.mark.processes
PATIENCE = 60.0


def shortest():
    """Each rank has another number of batches; all stop with the one that has the fewest."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    batches = torch.tensor([3 + rank % 4])
    work = dist.all_reduce(batches, dist.ReduceOp.MIN, async_op=True)
    work.wait()
    chosen = torch.zeros(1, dtype=torch.int64)
    if rank == 1:
        chosen.fill_(2)
        dist.send(chosen, 0)
    elif rank == 0:
        dist.recv(chosen, 1)
    for _ in range(int(batches)):
        dist.all_reduce(torch.ones(1000))
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, f"rank {rank}")


def test_a_larger_rehearsal_takes_the_decisions_of_the_small_run(tmp_path):
    file = tmp_path / "small.json"
    assert rehearse(shortest, 4, real_values=True, save_values=file, patience=PATIENCE).good
    saved = json.loads(file.read_text())
    assert saved["ranks"] == 4
    (minimum,) = (v for key, v in saved["values"].items() if key.endswith(" all_reduce") and v["0"][0] == [3])
    assert minimum == {str(rank): [[3]] for rank in range(4)}
    (received,) = (v for key, v in saved["values"].items() if key.endswith(" recv"))
    assert received == {"0": [[2]]}
    made_up = rehearse(shortest, 16, real_values=False, patience=PATIENCE)
    assert not made_up.good  # each rank takes its own number for the least
    assert rehearse(shortest, 16, recorded_values=file, patience=PATIENCE).good


def test_values_of_other_places_or_sizes_are_made_up(tmp_path):
    file = tmp_path / "other.json"

    def program():
        dist.init_process_group("gloo")
        x = torch.full((2,), 5.0)
        dist.all_reduce(x)
        assert x.tolist() == [20.0, 20.0]

    file.write_text(json.dumps({"ranks": 1, "values": {"elsewhere.py:1 all_reduce": {"0": [[1.0, 1.0]]}}}))
    assert rehearse(program, 4, recorded_values=file, patience=PATIENCE).good
    line = program.__code__.co_firstlineno + 3
    file.write_text(
        json.dumps({"ranks": 1, "values": {f"test_recorded_values.py:{line} all_reduce": {"0": [[1.0]]}}})
    )
    assert rehearse(program, 4, recorded_values=file, patience=PATIENCE).good
    file.write_text(
        json.dumps(
            {"ranks": 1, "values": {f"test_recorded_values.py:{line} all_reduce": {"0": [[1.0, 2.0]]}}}
        )
    )
    assert not rehearse(program, 4, recorded_values=file, patience=PATIENCE).good  # its assertion fails


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"ranks": 0, "values": {}}', '{"ranks": 1, "values": {"a": {"0": 3}}}', '{"ranks": 1e999}'],
)
def test_a_file_without_values_is_refused(tmp_path, text):
    (tmp_path / "values.json").write_text(text)
    (tmp_path / "train.py").write_text("")
    said = CliRunner().invoke(
        app, ["rehearse", "--values", str(tmp_path / "values.json"), str(tmp_path / "train.py")]
    )
    assert said.exit_code == 2
    assert "has no recorded values" in said.output


def test_made_up_values_are_not_saved(tmp_path):
    with pytest.raises(ValueError, match="only real values can be saved"):
        rehearse(shortest, 2, real_values=False, save_values=tmp_path / "x.json")
    with pytest.raises(ValueError, match="folder of"):
        rehearse(shortest, 2, real_values=True, save_values=tmp_path / "no" / "x.json")
