"""A program of torchcomms on two real ranks, unchanged, with the switch on: programs/behaviour.py."""

import json
import os
from pathlib import Path

import pytest

from tests import commands
from tests.processes import forked_interpreters

PROGRAM = Path(__file__).parent / "programs" / "behaviour.py"
pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


def run(folder, **env):
    """Returns what each rank saw, by section."""
    done = forked_interpreters.run(
        [*commands.torchrun(2), PROGRAM, folder],
        within=150,
        env=commands.clean_environment()
        | {"UNICOMM_TRACE_DIR": os.environ["UNICOMM_TRACE_DIR"], "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}
        | {"TORCHCOMM_FR_DUMP_TEMP_FILE": f"{folder}/fr_"}
        | env,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return run(tmp_path_factory.mktemp("behaviour"), UNICOMM_BACKEND="shm")


def test_operations_take_torchcomms_arguments(seen):
    for rank, (mine, other) in enumerate([([0.0, 1.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 1.0])]):
        both = sorted([mine, other])
        flat, total = [*both[0], *both[1]], [1.0, 3.0]
        of = seen[rank]["operations"]
        assert of["broadcast"] == [[1.0, 2.0]]
        assert of["all_reduce"] == [total]
        assert of["reduce"] == [[1.0, 2.0]]
        assert of["all_gather"] == both
        assert of["all_gather_v"] == [[0.0], [1.0, 2.0]]
        assert of["all_gather_single"] == of["all_gather_p"] == [flat]
        assert of["reduce_scatter"] == [[0.5, 1.5]]
        assert of["reduce_scatter_v"] == [total[:1] if rank == 0 else total]
        assert of["reduce_scatter_single"] == [[total[rank]]]
        swapped = [both[0][rank], both[1][rank]]
        assert of["all_to_all_single"] == of["all_to_all_v_single"] == [swapped]
        assert of["all_to_all"] == [[x + 10 * rank for x in part] for part in both]
        assert of["scatter"] == [[0.0 + rank, 1.0 + rank]]
        assert of["gather"] == (both if rank == 0 else [])
        assert of["gather_single"] == ([flat] if rank == 0 else [])
        assert of["send"] == both[0]
        assert of["async"] == [2 * x for x in total]


def test_async_op_is_required_and_hints_are_text(seen):
    for one in seen:
        assert one["operations"]["missing async_op"] == ["TypeError", False]
        assert one["operations"]["wrong hints"] == ["TypeError", False]


def test_hooks_receive_typed_arguments(seen):
    for rank, one in enumerate(seen):
        before, after = one["hooks"]["before"], one["hooks"]["after"]
        ids = [row[1] for row in before]
        assert ids == list(range(ids[0], ids[0] + len(ids)))
        other = "Send" if rank == 0 else "Recv"
        assert [(row[0].removeprefix("OpName."), row[2], row[3]) for row in before] == [
            ("all_reduce", "AllReducePreHookArgs", {"async_op": False, "tensor": [2]}),
            (
                "all_gather",
                "AllGatherPreHookArgs",
                {"async_op": False, "input": [2], "output": [[2], [2]]},
            ),
            (
                "reduce_scatter_single",
                "ReduceScatterSinglePreHookArgs",
                {"async_op": True, "input": [2], "output": [1]},
            ),
            (
                "all_to_all_v_single",
                "AllToAllVSinglePreHookArgs",
                {"async_op": False, "input": [2], "output": [2]}
                | {"input_split_sizes": [1, 1], "output_split_sizes": [1, 1]},
            ),
            (
                "gather_single",
                "GatherSinglePreHookArgs",
                {"async_op": False, "input": [2], "output": [4] if rank == 0 else None, "root": 0},
            ),
            ("barrier", "BarrierPreHookArgs", {"async_op": False}),
            (
                other.lower(),
                f"{other}PreHookArgs",
                {"async_op": False, "tensor": [2], "peer": 1 - rank},
            ),
            ("batch", "BatchOpIssuePreHookArgs", {"async_op": False, "num_ops": 2}),
            ("split", "SplitPreHookArgs", {"ranks": [rank], "name": "alone"}),
            ("split", "SplitPreHookArgs", {"ranks": [], "name": "nobody"}),
        ]
        kinds = ["CollectivePostHookArgs"] * 7 + ["BatchOpIssuePostHookArgs"] + ["SplitPostHookArgs"] * 2
        assert after == [[op_id, kind] for op_id, kind in zip(ids, kinds, strict=True)]
        assert one["hooks"]["refused"] == ["ValueError", False]
        assert one["hooks"]["last"] == [["OpName.finalize", 2**64 - 1, "FinalizePreHookArgs"]]


def test_an_issued_batch_keeps_its_operations(seen):
    for rank, one in enumerate(seen):
        got, other = one["batches"], 1.0 - rank
        assert got["returns"] == [None, None]
        assert (got["first"], got["second"], got["third"]) == (
            [other] * 2,
            [other + 10] * 2,
            [other + 20] * 2,
        )
        assert got["empty"] == ["InvalidArgumentError", True]


def test_splits(seen):
    for rank, one in enumerate(seen):
        said, timeouts, wrong = one["splits"]
        assert said == [1 - rank, 0.0, "turned", "TorchComm", rank == 1]
        assert timeouts == [30.0, 30.0]
        assert wrong == ["InvalidArgumentError", True]


def test_windows(seen):
    for rank, one in enumerate(seen):
        got = one["windows"]
        assert got["hook"] == ["NewWindowPreHookArgs"]
        assert got["memory"] == ([0.0, 0.0, 2.0, 2.0] if rank == 0 else [1.0, 1.0, 0.0, 0.0])
        assert got["theirs"] == seen[1 - rank]["windows"]["memory"]
        assert got["is"] == ["torch.float32", [4], "cpu", 16]
        assert got["attr"] is True
        assert got["device window"] == got["transport"] == ["UnsupportedError", True]


def test_objects(seen):
    for rank, one in enumerate(seen):
        everyone, gathered, sent, mine, got, unsafe = one["objects"]
        assert everyone == [{"rank": 0}, {"rank": 1}]
        assert gathered == ([0, 1] if rank == 1 else None)
        assert (sent, mine, got) == ([1, "two"], ["ab"[rank]], 5)
        # Only the receiver says whether it reads any object.
        assert unsafe == (None if rank == 0 else ["MismatchError", True])


def test_clog_writes_the_events_that_were_asked_for_and_follows_splits(seen):
    for rank, one in enumerate(seen):
        lines, twice, unknown = one["logs"]
        for name, log in lines.items():
            assert log[0].startswith("V|1|base_timestamp=")  # the old content is gone
            assert log[1].startswith(f"new_comm|comm=log {name}|rank={rank}|world_size=2")
            assert any(line.startswith("new_comm|comm=grand") for line in log)
            assert sum("|Q|" in line for line in log) == 4
            assert sum("|E|" in line for line in log) == (4 if name == "all" else 0)
            buffers = [
                line for line in log if "|sig|all_reduce|in_count=1024|dtype=float32|in_ptr=0x" in line
            ]
            assert bool(buffers) == (name == "all")
        assert twice == unknown == ["InvalidArgumentError", True]


def test_nan_checks(seen):
    for rank, one in enumerate(seen):
        assert one["nans"]["inputs"] == [False, True, ["CommError", True]], rank
        assert one["nans"]["outputs"] == [False, True, ["CommError", True]], rank


def test_the_recorder_hook_dumps_registered_communicators_and_their_splits(seen):
    for one in seen:
        got = one["recorder"]
        assert got["before"] == [False, 0, []]
        assert got["enabled"] == [True, False]
        assert got["names"] == ["all_reduce", "all_reduce", "barrier"]
        assert got["states"] == ["completed"] * 3
        assert (got["most"], got["unfinished"], got["after reset"], got["file"]) == (3, [], 0, True)


def test_device_meshes(seen):
    for rank, one in enumerate(seen):
        assert one["meshes"] == ["dp", [2.0, 2.0], "dp_tp", 2, rank, [2.0, 2.0]]


def test_memory_and_backend(seen):
    for one in seen:
        assert one["memory"] == [[2.0] * 3, 3, "shm", "ShmBackend"]


def test_ends_and_unknown_names(seen):
    for one in seen:
        called, supported, aborted, late, unknown = one["ends"]
        assert (called, supported, aborted) == (["abort hook"], [True, False], True)
        assert late == ["AbortedError", True]
        assert unknown == [["UnknownBackendError", True], ["InvalidArgumentError", True]]
