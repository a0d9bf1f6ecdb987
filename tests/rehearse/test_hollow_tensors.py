"""Hollow tensors in this process: the layouts of computed ones, no memory, made-up small results."""

import copy
import io
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from unicomm.c10d.calls.dispatcher import is_observed
from unicomm.rehearse.hollow import memory
from unicomm.rehearse.hollow.mode import HollowTensors
from unicomm.rehearse.hollow.rules import NotKnownError

LEAST = 1 << 14


@pytest.fixture
def hollow():
    memory.set_least(LEAST)
    try:
        with HollowTensors():
            yield
    finally:
        memory.set_least(None)


def layouts(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    if isinstance(value, (list, tuple)):
        return [layouts(one) for one in value]
    return value


def convolution():
    net = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(True), nn.MaxPool2d(2))
    net = net.to(memory_format=torch.channels_last)
    y = net(torch.randn(4, 3, 64, 64).to(memory_format=torch.channels_last))
    y.sum().backward()
    return [y, *(p.grad for p in net.parameters()), *net.buffers()]


def attention():
    q = torch.randn(2, 4, 128, 32, requires_grad=True)
    y = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    y.transpose(1, 2).reshape(2, 128, 128).sum().backward()
    return y, q.grad


def training():
    net = nn.Sequential(nn.Embedding(512, 128), nn.LayerNorm(128), nn.Linear(128, 512), nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    words = torch.randint(0, 512, (4, 64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = functional.cross_entropy(net(words).flatten(0, 1), words.flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    assert torch.isfinite(loss)
    assert torch.isfinite(norm)
    state = [value for one in optimizer.state.values() for value in one.values()]
    return [loss, norm, *net.parameters(), *state]


def views_and_joins():
    x = torch.randn(128, 256)
    parts = x.split([32, 96])
    joined = torch.cat([parts[1], parts[0]]).t().contiguous().view(64, 4, 128)
    return [
        joined,
        x[::2, 3:],
        x.expand(3, 128, 256),
        torch.stack(x.unbind(0)),
        x.sort(1),
        x.topk(3),
        x.cumsum(0),
    ]


def new_ones():
    x = torch.randn(128, 256, dtype=torch.float16)
    more = [torch.zeros_like(x), x.new_full((300, 100), 2), torch.arange(10000), torch.eye(200), x.float()]
    return [*more, torch.full((100, 100), 2.5), x.to(torch.bfloat16), torch.ones(64, 1) * torch.ones(1, 640)]


def recurrent():
    y, state = nn.LSTM(64, 64, 2, batch_first=True)(torch.randn(4, 64, 64))
    y.sum().backward()
    return y, state


@pytest.mark.parametrize("case", [convolution, attention, training, views_and_joins, new_ones, recurrent])
def test_layouts_are_those_of_computed_tensors(case):
    expected = layouts(case())
    memory.set_least(LEAST)
    try:
        with HollowTensors():
            found = layouts(case())
    finally:
        memory.set_least(None)
    assert found == expected


def test_operations_take_no_memory(hollow):
    def used():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    (torch.ones(256, 256) @ torch.ones(256, 256)).add_(1)  # imports
    before = used()
    x = torch.randn(20000, 20000)
    y = (x @ x).relu_().softmax(-1)
    y[3:5].copy_(x[:2])
    nn.Linear(20000, 20000)(y)
    copy.deepcopy(y)
    assert used() - before < 100e6  # one of these tensors has 1.6 GB


def test_one_tensor_may_be_larger_than_the_memory(hollow):
    x = torch.zeros(1 << 40, dtype=torch.uint8)
    assert x[1 << 39 :].numel() == 1 << 39
    assert x.add_(1).data_ptr()


def test_small_tensors_are_computed(hollow):
    x = torch.arange(6.0).view(2, 3)
    assert (x @ x.t()).tolist() == [[5.0, 14.0], [14.0, 50.0]]
    x.add_(1)
    assert x.sum().item() == 21


def test_made_up_results(hollow):
    x = torch.randn(1000, 1000)
    assert x.mean().item() == 1
    assert x.mean().log().isfinite()
    assert x.isfinite().all()
    assert not x.isnan().any()
    assert x[3, 4].item() == 1
    rows = x.sum(1)
    assert (rows > 0).all()
    assert rows.unique().numel() > 100
    assert torch.histc(torch.rand(10000), bins=8).sum() == 10000
    assert torch.randint(0, 8, (10003,)).bincount(minlength=8).tolist() == [1251] * 3 + [1250] * 5
    overflows = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([x], overflows, torch.ones(()))
    assert overflows == 0


def test_masks_that_are_known_select_and_others_are_refused(hollow):
    x = torch.randn(1000, 1000)
    mask = torch.arange(1000) % 4 == 0
    assert x[mask].shape == (250, 1000)
    x[mask] = 0
    for case in (lambda: x[x > 0], x.nonzero, x.unique):
        with pytest.raises(NotKnownError, match="which --meta does not compute"):
            case()


def test_wrong_shapes_raise_as_ever(hollow):
    with pytest.raises(RuntimeError, match="same reduction dim"):
        torch.randn(100, 1000) @ torch.randn(999, 100)
    with pytest.raises(RuntimeError):
        torch.randn(1000, 100).add_(torch.randn(1000, 99))


def test_meta_tensors_of_torch_become_hollow(hollow):
    with torch.device("meta"):
        layer = nn.Linear(50000, 50000)
    assert layer.weight.is_meta
    layer.to_empty(device="cpu").reset_parameters()
    assert layer.weight.device.type == "cpu"
    assert memory.is_hollow(layer.weight)


def test_storages_that_are_freed_and_allocated_again(hollow):
    x = torch.empty(1000, 1000)
    address = x.data_ptr()
    x.untyped_storage().resize_(0)
    assert memory.is_hollow(x)
    x.untyped_storage().resize_(4_000_000)
    assert x.data_ptr()
    assert address
    x.fill_(3)


def test_tensors_are_computed_where_data_counts(hollow):
    with memory.computed():
        x = torch.ones(100, 100)
        assert x.sum() == 10000
        assert memory.was_hollow(x)
    assert memory.is_hollow(x)


def test_groups_take_their_usual_way(hollow):
    x = [torch.ones(2)]
    assert not is_observed([x])
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert is_observed([x])


def test_subclasses_take_their_operations_apart(hollow):
    store = dist.HashStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=4)
    try:
        mesh = dist.init_device_mesh("cpu", (4,))
        whole = torch.randn(4000, 1000)
        sharded = dist.tensor.distribute_tensor(whole, mesh, [dist.tensor.Shard(0)])
        assert sharded.to_local().shape == (1000, 1000)
        y = sharded @ torch.distributed.tensor.distribute_tensor(
            torch.randn(1000, 500), mesh, [dist.tensor.Replicate()]
        )
        assert y.full_tensor().shape == (4000, 500)
    finally:
        dist.destroy_process_group()


def test_numbers_in_files(hollow):
    small = torch.ones(3)
    file = io.BytesIO()
    torch.save({"small": small}, file)
    file.seek(0)
    assert torch.load(file)["small"].tolist() == [1, 1, 1]
