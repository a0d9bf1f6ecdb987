"""A communication failure in the middle of a backward is an exception: no signal, and `finally` blocks run.

torch's Reducer looks for tensors in the value of a future; one that had failed used to end the process.
"""

import pytest
import torch

from tests.c10d.launch import PROGRAMS
from tests.ports import free_port

CAUSE = {"lost": "PeerLostError", "late": "CommTimeoutError", "mismatch": "MismatchError"}
#: torch's Reducer passes on the text of an error, not its type.
TYPE_IS_LOST = ("ddp", "hook", "compiled")


def play(programs, folder, kind, fault, ranks, backend):
    """Runs the program; returns the exit code of each rank, None for one still asleep, and their stderr."""
    env = {
        "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1",
        "UNICOMM_BACKEND": backend,
        "UNICOMM_TRACE_DIR": str(folder),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
    }
    codes, _, complaints = programs.run_each(
        PROGRAMS / "failing_step.py",
        [kind, fault, folder],
        [env | {"RANK": str(rank)} for rank in range(ranks)],
        within=90,
        fail_together=False,
        but=[1] if fault == "late" else [],
    )
    return codes, complaints


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "fault", "ranks", "backend"),
    [
        *(("ddp", fault, ranks, "shm") for fault in CAUSE for ranks in (2, 4)),
        *(("ddp", fault, 2, "gloo") for fault in CAUSE),
        *((kind, fault, 2, "shm") for kind in ("fsdp", "compiled") for fault in CAUSE),
        ("hook", "lost", 2, "shm"),
        ("fsdp", "lost", 4, "gloo"),
        ("compiled", "mismatch", 4, "gloo"),
    ],
)
def test_it_is_an_exception(forked_programs, tmp_path, kind, fault, ranks, backend):
    codes, complaints = play(forked_programs, tmp_path, kind, fault, ranks, backend)
    said = [text[-3000:] for text in complaints]
    expected = {"lost": -9, "late": None, "mismatch": 3}
    assert codes == [expected[fault] if r == 1 else 3 for r in range(ranks)], said
    for r in range(ranks):
        if codes[r] != 3:
            continue
        name, _, text = (tmp_path / str(r)).read_text().partition(": ")
        # Rank 1 calls the other collective itself.
        assert name == ("RuntimeError" if kind in TYPE_IS_LOST and r != 1 else CAUSE[fault]), text
        assert CAUSE[fault] in f"{name}: {text}"
        assert "rank 1" in text
        assert torch.load(tmp_path / f"checkpoint-{r}") == {"step": 2}
