"""Runs a program on stock Gloo and with the switch, and compares what its ranks wrote."""

import json

from tests.c10d.launch import PROGRAMS, torchrun


def same_results(folder, program, backend, ranks=2):
    """Runs `program FOLDER`, whose ranks write JSON to FOLDER/RANK, both ways. Returns what rank 0 wrote."""
    results = {}
    for stock in (True, False):
        own = folder / ("stock" if stock else backend)
        own.mkdir()
        env = {} if stock else {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1", "UNICOMM_BACKEND": backend}
        done = torchrun(ranks, PROGRAMS / program, own, stock=stock, **env)
        assert done.returncode == 0, done.stderr[-3000:]
        results[stock] = [json.loads((own / str(rank)).read_text()) for rank in range(ranks)]
    assert results[False] == results[True]
    return results[True][0]
