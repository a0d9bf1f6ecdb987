"""Ranks as processes over the mock of NCCL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.processes import forked_interpreters

HERE = Path(__file__).parent
WITHIN = 200


def run(
    tmp_path: Path, fault: str, n: int = 3, peer_errors: str = "1", job: str = "job.py"
) -> list[tuple[int, str, str]]:
    """Exit code, output and complaints of each rank."""
    import os

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    base = {k: v for k, v in os.environ.items() if not k.startswith(("UNICOMM_", "TORCHELASTIC_"))}
    base |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "NCCL_MOCK_PEER_ERRORS": peer_errors,
        "UNICOMM_TRACE_DIR": str(tmp_path),
        "NCCL_MOCK_LOG": str(tmp_path / "calls"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(HERE / "programs" / job), fault]
    ranks = [
        forked_interpreters.Popen(
            command,
            env=base | {"RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(n)
    ]
    try:
        said = [rank.communicate(timeout=WITHIN) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *text) for rank, text in zip(ranks, said, strict=True)]


@pytest.mark.processes
def test_a_job(tmp_path, mock_nccl_library):
    mock_nccl_library()  # built before the ranks need it
    for code, out, complaints in run(tmp_path, "none"):
        assert (code, out) == (0, "done\n"), complaints


@pytest.mark.processes
def test_a_killed_rank_is_an_error_on_the_others(tmp_path, mock_nccl_library):
    mock_nccl_library()
    ranks = run(tmp_path, "kill")
    assert ranks[1][0] == -9
    for code, out, complaints in (ranks[0], ranks[2]):
        assert code == 0, complaints
        assert out.startswith("caught PeerLostError True (1,)")
        assert out.endswith("done\n")


@pytest.mark.processes
def test_a_killed_rank_of_which_the_library_says_nothing_is_found_long_before_the_deadline(
    tmp_path, mock_nccl_library
):
    mock_nccl_library()
    ranks = run(tmp_path, "kill silently", 2, "0")
    assert ranks[1][0] == -9
    code, out, complaints = ranks[0]
    assert code == 0, complaints
    assert out == "caught PeerLostError True (1,)\ndone\n"


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_a_killed_rank_is_left_out_and_replaced(tmp_path, mock_nccl_library):
    mock_nccl_library()
    ranks = run(tmp_path, "", 4, job="elastic_job.py")
    assert ranks[1][0] == -9
    for rank in (0, 2, 3):
        code, out, complaints = ranks[rank]
        assert code == 0, complaints
        before = "epoch [0, 1, 2]\ncaught PeerLostError\nepoch [0, 2]\n" if rank != 3 else ""
        assert out == f"{before}epoch [0, 2, 3]\ndone\n"
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    made = [call["function"] for call in calls if call["result"] == 0]
    counts = [made.count(f"ncclComm{name}") for name in ("InitRankConfig", "Revoke", "Shrink", "Grow")]
    assert counts == [3, 2, 2, 3]
