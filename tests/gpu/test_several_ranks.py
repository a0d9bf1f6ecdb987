"""Ranks on several GPUs, and several ranks on one, where the library allows that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.share_job import program

HERE = Path(__file__).parent
SINCE = 23000  # NCCL, with NCCL_MULTI_RANK_GPU_ENABLE=1
WITHIN = 110


@pytest.mark.parametrize("n", [2, 4])
def test_a_gpu_for_each_rank(kit, n):
    assert kit.ranks(n, program) == [True] * n


@pytest.mark.gpu
@pytest.mark.processes
def test_ranks_share_a_gpu(tmp_path):
    """Each rank is a process: the library refuses two ranks of one process on one GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use here")
    from unicomm.backends.nccl.library import NCCL, open_library, version_text

    if torch.version.hip is not None:
        pytest.skip("RCCL has one rank on a GPU at most")
    if (version := open_library(NCCL).version) < SINCE:
        pytest.skip(f"NCCL {version_text(version)} has one rank on a GPU at most, until 2.30")
    base = dict(os.environ) | {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "UNICOMM_TRACE_DIR": str(tmp_path)}
    command = [sys.executable, str(HERE / "share_job.py"), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], env=base, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=WITHIN)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, said, strict=True):
        assert rank.returncode == 0, text
