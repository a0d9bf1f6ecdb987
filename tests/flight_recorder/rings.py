"""Helpers: rings written by this process and by others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from unicomm import _core
from unicomm.comms.operations.dtypes import NAMES
from unicomm.comms.operations.reduction import RedOpType
from unicomm.comms.operations.table import BY_CODE

META = json.dumps(
    {
        "ops": {str(code): row.name for code, row in BY_CODE.items()},
        "dtypes": {str(code): name for code, name in NAMES.items()},
        "reductions": {"0": "", **{str(int(r)): r.name for r in RedOpType}},
        "host": "here",
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "argv": ["train.py"],
    }
)
ALL_REDUCE, SEND, RECV, BROADCAST = 4, 1, 2, 3


def write_ring(
    path: Path, rank: int, world: int, operations: int, records: int = 64, unfinished: bool = False
) -> _core.Recorder:
    """A ring with `operations` all-reduces of one communicator; the last one is not over if `unfinished`."""
    recorder = _core.Recorder(str(path), META, rank, world, records)
    comm = recorder.add_comm(
        name="main", backend="shm", uid="u1", ranks=f"0-{world - 1}", rank=rank, size=world
    )
    tensor = [torch.ones(2, 3)]
    for seq in range(1, operations + 1):
        record = recorder.begin(comm, ALL_REDUCE, seq, seq, tensor, tensor, 1)
        if seq < operations or not unfinished:
            recorder.finish(record)
    return recorder


def python(code: str, env: dict[str, str], **options: object) -> subprocess.Popen[str]:
    """A Python process that runs `code`, with its output piped."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        **options,  # type: ignore[call-overload]
    )
