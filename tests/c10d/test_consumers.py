"""Libraries on top of torch.distributed give the same numbers on unicomm as on stock Gloo."""

import json

import pytest
import torch

from tests.c10d.launch import forked

CONSUMERS = 18


@pytest.mark.processes
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [2, 4])
def test_same_numbers_as_stock_gloo(forked_programs, ranks, tmp_path):
    for name in ("stock", "switched"):
        stock = name == "stock"
        env = {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "0" if stock else "1"}
        done = forked(forked_programs, ranks, "consumers.py", tmp_path, name, stock=stock, **env)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    for rank in range(ranks):
        stock, switched = (
            json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for name in ("stock", "switched")
        )
        assert (stock["group"], switched["group"]) == ("ProcessGroup", "UnicommProcessGroup")
        assert len(switched["results"]) == CONSUMERS
        failed = {name: text for name, text in switched["results"].items() if isinstance(text, str)}
        assert failed == {}
        for name, values in switched["results"].items():
            assert len(values) == len(stock["results"][name]) > 0, name
            # Four ranks are summed in another order. The bfloat16 and half hooks round their sums.
            loose = (
                {"rtol": 2e-2, "atol": 2e-3} if name in ("ddp_comm_hooks", "fsdp2_mixed_precision") else {}
            )
            for i, (a, b) in enumerate(zip(values, stock["results"][name], strict=True)):
                torch.testing.assert_close(
                    torch.tensor(a),
                    torch.tensor(b),
                    msg=lambda text, name=name, i=i: f"{name}[{i}]: {text}",
                    **loose,
                )
