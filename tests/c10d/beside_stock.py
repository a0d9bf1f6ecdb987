"""Runs a program on stock Gloo and with the switch, and compares what its ranks wrote."""

import json

from tests.c10d.launch import forked


def same_results(programs, folder, program, backends=("shm", "gloo"), ranks=2):
    """Runs `program FOLDER`, whose ranks write JSON to FOLDER/RANK, on stock Gloo and on each backend.

    `programs` is the fixture `forked_programs`. Returns what rank 0 wrote, which is the same for all.
    """
    stock = _results(programs, folder, program, "stock", ranks)
    for backend in backends:
        assert _results(programs, folder, program, backend, ranks) == stock, backend
    return stock[0]


def _results(programs, folder, program, name, ranks):
    own, stock = folder / name, name == "stock"
    own.mkdir()
    env = {} if stock else {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1", "UNICOMM_BACKEND": name}
    done = forked(programs, ranks, program, own, stock=stock, **env)
    assert done.returncode == 0, f"{name}: {done.stderr[-3000:]}"
    return [json.loads((own / str(rank)).read_text()) for rank in range(ranks)]
