"""The operations of torch.ops.symm_mem one by one, on CPU tensors: torch_operators.py HOW BACKEND

list      which operations are there, and what calling one says that is not
products  products with a gather or a scatter, in float32, bfloat16 and float8, and with signals
"""

import functools
import sys
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tests.old_torch import OLD_TORCH
from tests.processes.programs.common import leave, say
from unicomm import UnsupportedError, symm
from unicomm.symm.torch_operators import load_unit

HOW, BACKEND = sys.argv[1:]
dist.init_process_group(BACKEND)
ops = torch.ops.symm_mem
F8 = torch.float8_e4m3fn


def declared():
    schemas = (schema.name.partition("::") for schema in torch._C._jit_get_all_schemas())
    return {name for space, _, name in schemas if space == "symm_mem"}


def check_list():
    """All that torch declares is there, and two operations more that there are no kernels for."""
    usual = declared()
    absent = sorted(set(load_unit().operators()) - usual)
    more = torch.library.Library("symm_mem", "FRAGMENT")
    more.define("unheard_of(Tensor x) -> Tensor")
    more.define("unheard_of_numbers(int x) -> int")
    unheard = {"unheard_of": "does not know it", "unheard_of_numbers": "does not know it"}
    if absent:  # one of a newer torch, which declares it otherwise
        more.define(f"{absent[0]}(Tensor x, str y) -> Tensor")
        unheard[absent[0]] = "declares it otherwise"
    before = symm.torch_operators()
    names = symm.use_in_torch()
    assert names
    found = symm.torch_operators()
    assert found == before  # looking at them changed nothing, nor did using them
    assert [operator.name for operator in found] == sorted(usual | set(unheard))
    assert all(operator.text for operator in found)
    left = {operator.name: operator.text for operator in found if not operator.served}
    for name, text in unheard.items():
        assert text in left.pop(name)
    # All others have a kernel for CPU tensors.
    for name in usual - set(left):
        assert any(
            torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", key)
            for key in ("CPU", "BackendSelect", "CompositeExplicitAutograd")
        ), name
    for name, text in unheard.items():
        arguments = [1] if name.endswith("numbers") else [torch.ones(1), "x"][: 1 + (name in absent)]
        with pytest.raises(UnsupportedError, match=text) as error:
            getattr(ops, name)(*arguments)
        assert f"torch.ops.symm_mem.{name} does not run on CPU tensors" in str(error.value)
        assert "torch_operators()" in error.value.hint
    say("listed", left=left, otherwise=len(absent))


def close(got, wanted, dtype=None):
    """Equal within one rounding of `dtype`."""
    assert got.dtype == (dtype or got.dtype)
    assert got.shape == wanted.shape
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, F8: 2**-3}[got.dtype]
    torch.testing.assert_close(got.double(), wanted.double(), rtol=tolerance, atol=tolerance)


looked_at = set()


def as_planned(op, *arguments, **options):
    """What the operation gives, laid out as torch's own kernel without data says, by which compilers plan."""
    got = op(*arguments, **options)
    dimensions = (op, *(value for value in arguments if isinstance(value, int)))
    if rank == 0 and dimensions not in looked_at:  # once, for it costs more than the operation
        looked_at.add(dimensions)
        planned = op(*map(without_data, arguments), **options)
        for x, y in zip(tensors(got), tensors(planned), strict=True):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
    return got


def without_data(value):
    if isinstance(value, list):
        return [without_data(part) for part in value]
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def tensors(value):
    return [value] if isinstance(value, torch.Tensor) else [t for part in value or [] for t in tensors(part)]


def product(a, b, a_scale=1.0, b_scale=1.0):
    """With numbers as they are, in double precision."""
    a, b = (torch.from_numpy(np.asarray(t.float().numpy(), np.float64)) for t in (a, b))
    return (a * a_scale) @ (b * b_scale)


def check_plain(me, n, group, dtype):
    torch.manual_seed(5)
    for dim in range(3):
        every = torch.randn(n, 2, 3, 4).to(dtype)
        whole = torch.cat(list(every), dim)
        matrices = [torch.randn(whole.shape[-1], k).to(dtype) for k in (5, 1)]
        gathered, products = as_planned(ops.fused_all_gather_matmul, every[me], matrices, dim, group)
        assert torch.equal(gathered, whole)
        for got, b in zip(products, matrices, strict=True):
            close(got, product(whole, b), dtype)
        nothing, again = as_planned(
            ops.fused_all_gather_matmul, every[me], matrices, dim, group, return_A=False
        )
        assert nothing is None
        assert all(torch.equal(x, y) for x, y in zip(again, products, strict=True))
    for dim in range(3):
        shape = [2, 3, 4]
        shape[dim] *= n if dim < 2 else 1
        every, b = torch.randn(n, *shape).to(dtype), torch.randn(4, 2 * n).to(dtype)
        partial = torch.stack([(a @ b).float() for a in every])  # rounded on each rank
        for op, total in (("sum", partial.sum(0)), ("avg", partial.mean(0))):
            got = as_planned(ops.fused_matmul_reduce_scatter, every[me], b, op, dim, group)
            close(got, total.chunk(n, dim)[me], dtype)
    x = torch.randn(n, 2 * n, 3).to(dtype)
    assert torch.equal(as_planned(ops._low_contention_all_gather, x[me], group), x.flatten(0, 1))
    for op, total in (("sum", x.double().sum(0)), ("avg", x.double().mean(0))):
        close(as_planned(ops._low_contention_reduce_scatter, x[me], op, group), total.chunk(n)[me], dtype)


def quantized(*shape):
    return torch.randn(shape).to(F8)


def check_float8_gather(me, n, group):
    torch.manual_seed(6)
    for dim in range(3):
        every = quantized(n, 2, 3, 16).view(torch.uint8)
        whole = torch.cat(list(every), dim).view(F8)
        a = every.view(F8)[me]
        matrices = [quantized(k, whole.shape[-1]).t() for k in (16, 32)]
        columns = [torch.rand(1, b.shape[1]) + 0.5 for b in matrices]
        one, ones = torch.tensor(0.5), [torch.tensor(2.0), torch.tensor(3.0)]
        bias = [None, torch.randn(32).bfloat16()]
        kinds = [("tensor", one, one, ones)]
        if dim < 2 and not OLD_TORCH:  # whose own product takes scales of tensors alone
            rows = torch.rand(*whole.shape[:-1], 1) + 0.5
            kinds += [
                ("row, this rank's", rows.chunk(n, dim)[me], rows, columns),
                ("row, of all", rows, rows, columns),
            ]
        for _, passed, scale, scales in kinds:
            for dtypes in ([torch.float32, torch.bfloat16], [torch.bfloat16, torch.bfloat16]):
                run = ops.fused_all_gather_scaled_matmul
                if dim < 2:  # along the last, torch has no plan
                    run = functools.partial(as_planned, run)
                gathered, products = run(
                    a, matrices, passed, scales, dim, group, bias, [None] * 2, dtypes, [False, True]
                )
                assert torch.equal(gathered.view(torch.uint8), whole.view(torch.uint8))
                for got, b, b_scale, add, dtype in zip(products, matrices, scales, bias, dtypes, strict=True):
                    wanted = product(whole, b, scale, b_scale) + (0 if add is None else add.double())
                    close(got, wanted, dtype)
                    # The unfused way: gather, then torch's product.
                    flat = scale if scale.numel() == 1 else scale.flatten(0, -2)
                    unfused = torch._scaled_mm(
                        whole.flatten(0, -2).contiguous(), b, flat, b_scale, add, out_dtype=dtype
                    )
                    close(got, unfused.view(*whole.shape[:-1], -1), dtype)
        # Without a dtype it is A's.
        _, (small,) = ops.fused_all_gather_scaled_matmul(
            a, matrices[:1], one * 0.1, ones[:1], dim, group, [None], [None], [None], [False]
        )
        close(small, product(whole, matrices[0], 0.05, 2.0), F8)


def check_float8_scatter(me, n, group):
    torch.manual_seed(7)
    for dim in range(3):
        shape = [2 * n, n, 16]
        every, b = quantized(n, *shape), quantized(16 * n, 16).t()
        columns, rows = torch.rand(1, 16 * n) + 0.5, torch.rand(n, *shape[:-1], 1) + 0.5
        one = torch.tensor(0.5)
        for a_scale, b_scale in ((one, one * 4), (rows, columns))[: 1 if OLD_TORCH else 2]:
            for dtype in (torch.float32, torch.bfloat16):
                mine = a_scale if a_scale.numel() == 1 else a_scale[me]
                # Rounded on each rank, as the unfused product is.
                partial = torch.stack(
                    [
                        product(a, b, a_scale if a_scale.numel() == 1 else a_scale[p], b_scale).to(dtype)
                        for p, a in enumerate(every)
                    ]
                ).double()
                for op, total in (("sum", partial.sum(0)), ("avg", partial.mean(0))):
                    wanted = total.chunk(n, dim)[me]
                    arguments = (op, dim, dim, group, [*shape[:-1], 16 * n])
                    got = as_planned(
                        ops.fused_scaled_matmul_reduce_scatter,
                        every[me],
                        b,
                        mine,
                        b_scale,
                        *arguments,
                        out_dtype=dtype,
                    )
                    close(got, wanted, dtype)
                    # The rows may come as a matrix; the shape of the product says where it is cut.
                    flat = mine if mine.numel() == 1 else mine.flatten(0, -2)
                    arguments = (op, dim, 0, group, [*shape[:-1], 16 * n])
                    again = as_planned(
                        ops.fused_scaled_matmul_reduce_scatter,
                        every[me].flatten(0, -2),
                        b,
                        flat,
                        b_scale,
                        *arguments,
                        out_dtype=dtype,
                    )
                    assert torch.equal(got, again)


def check_refusals(me, n, group):
    a, b, one = quantized(4, 16), quantized(16, 16).t(), torch.tensor(1.0)

    def gather(a=a, scale=one, dim=0, result=None, counts=1):
        return ops.fused_all_gather_scaled_matmul(
            a, [b], scale, [one] * counts, dim, group, [None], [result], [None], [False]
        )

    def scatter(a=a, scale=one, op="sum", dim=0, shape=(4, 16), result=None):
        return ops.fused_scaled_matmul_reduce_scatter(
            a, b, scale, one, op, dim, 0, group, shape, result_scale=result
        )

    x = torch.ones(3, 4)
    for call, text in (
        (lambda: gather(result=one), "multiply the result"),
        (lambda: gather(counts=2), "1 matrices in Bs, 2 in B_scales"),
        (lambda: gather(scale=torch.ones(3, 1)), "A_scale is"),
        (lambda: gather(scale=torch.ones(4, 1), dim=1), "along the last dimension one number"),
        (lambda: gather(dim=2), "gather_dim=2"),
        (lambda: gather(a=a[0]), "two dimensions"),
        (lambda: scatter(result=one), "multiply the result"),
        (lambda: scatter(op="max"), "sum nor avg"),
        (lambda: scatter(scale=torch.ones(3, 1)), "A_scale is"),
        (lambda: scatter(shape=(5, 16)), "other rows"),
        (lambda: scatter(a=a[:3], shape=(3, 16)), "equal parts"),
        (lambda: ops.fused_all_gather_matmul(x, [torch.ones(4, 4)], -2, group), "gather_dim=-2"),
        (lambda: ops.fused_matmul_reduce_scatter(x, torch.ones(4, 4), "sum", 0, group), "equal parts"),
        (lambda: ops._low_contention_reduce_scatter(x, "max", group), "sum nor avg"),
        (lambda: ops._async_input_mm(x, x.t(), torch.ones(2, dtype=torch.uint32), 0), "3 rows"),
        (lambda: ops._async_input_mm(x, x.t(), torch.ones(3), 0), "uint32"),
        (lambda: ops._async_input_mm(x, x.t(), torch.ones(3, dtype=torch.uint32), 3), "a_chunk_pivot=3"),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()


def made(values, group):
    tensor = symm_mem.empty(values.shape, dtype=values.dtype, device="cpu")
    tensor.copy_(values)
    handle = symm_mem.rendezvous(tensor, group)
    handle.barrier()
    return tensor, handle


def check_signals(me, n, group):
    """Chunks of a matrix come from their ranks while this one multiplies."""
    torch.manual_seed(8)
    whole, b = torch.randn(2 * n, 3), torch.randn(3, 4)
    a, chunks = made(torch.full_like(whole, torch.nan), group)
    signals, words = made(torch.zeros(n, dtype=torch.uint32), group)
    results = []
    thread = threading.Thread(target=lambda: results.append(ops._async_input_mm(a, b, signals, me)))
    thread.start()
    chunks.barrier()
    for step in range(n):
        peer = (me + step) % n
        assert n == 1 or thread.is_alive() or signals.all()
        chunks.get_buffer(peer, a.shape, a.dtype)[2 * me : 2 * me + 2] = whole[2 * me : 2 * me + 2]
        ops.stream_write_value32_(words.get_buffer(peer, (n,), torch.uint32), me, 1)
    thread.join()
    close(results[0], product(whole, b), torch.float32)
    # What is set already is not waited for; other types.
    close(ops._async_input_mm(a.bfloat16(), b.bfloat16(), signals, 0), whole @ b, torch.bfloat16)
    chunks.barrier()

    # A value beside the tensor: what it was, or more.
    x, handle = made(torch.full((3,), float(me)), group)
    following, previous = (me + 1) % n, (me - 1) % n
    for turn in range(n):
        x.fill_(me)
        handle.barrier()
        if me == turn:
            ops.nccl_put_with_signal(x, 5 + turn, following)
        if previous == turn:
            ops.nccl_wait_for_signal(x, 5 + turn)
            assert x.tolist() == [previous] * 3
            ops.nccl_wait_for_signal(x, 4)
        handle.barrier()
    assert not handle.get_signal_pad(me).any()


def check_newer(me, n, group):
    """What torch declares since 2.14."""
    there = {operator.name for operator in symm.torch_operators() if operator.served}
    _, handle = made(10.0 * me + torch.arange(6.0), group)
    for name in ("nvshmem_get_out", "nccl_get_out"):
        if name in there:
            got = torch.zeros(5)
            getattr(ops, name)(got, handle.boxed(), 2, 3, (me + 1) % n)
            start = 10 * ((me + 1) % n) + 2
            assert got.tolist() == [start, start + 1, start + 2, 0, 0]
            with pytest.raises(RuntimeError):
                getattr(ops, name)(got, handle.boxed(), 2, 5, 0)
    if hasattr(symm_mem, "get"):
        symm_mem.get(got := torch.zeros(2), handle, (me + 1) % n, offset=1)
        assert got.tolist() == [10 * ((me + 1) % n) + 1, 10 * ((me + 1) % n) + 2]
    if "nccl_all_to_all_nd" in there:
        data = torch.arange(n * 2 * n * 3).view(n, 2, n, 3)  # rank, row, block, column
        for shape in ((2, n, 3), (2, n * 3)):
            source, _ = made(data[me].reshape(shape), group)
            for to in ((n, 2, 3), (n * 2, 3)):
                out = torch.zeros(to, dtype=data.dtype)
                symm_mem.all_to_all_nd(source, out, 1, 0, group=group)
                assert torch.equal(out.view(n, 2, 3), data[:, :, me])
        data = data.permute(0, 2, 1, 3).contiguous()  # rank, block, row, column
        for shape in ((n, 2, 3), (n * 2, 3)):
            source, _ = made(data[me].reshape(shape), group)
            for to in ((2, n, 3), (2, n * 3)):
                out = torch.zeros(to, dtype=data.dtype)
                symm_mem.all_to_all_nd(source, out, 0, 1, group=group)
                assert torch.equal(out.view(2, n, 3), data[:, me].permute(1, 0, 2))
        with pytest.raises(RuntimeError, match="has to be"):
            symm_mem.all_to_all_nd(source, torch.zeros(n), 1, 1, group=group)
    if "memcpy_to_multicast_" in there:
        out, handle = made(torch.zeros(n, 3), group)
        assert ops.memcpy_to_multicast_(out, torch.full((3,), 1.0 + me), 12 * me, group) is out
        handle.barrier()
        assert out.tolist() == [[1.0 + p] * 3 for p in range(n)]
        handle.barrier()
        with pytest.raises(RuntimeError, match="do not lie in"):
            ops.memcpy_to_multicast_(out, torch.ones(3), 12 * n - 4, group)
    if "_low_contention_all_gather_ce_multicast" in there:
        part = torch.full((2, 3), float(me))
        whole = torch.arange(float(n)).repeat_interleave(6).view(2 * n, 3)
        assert torch.equal(ops._low_contention_all_gather_ce_multicast(part, group), whole)
        out, _ = made(torch.zeros(2 * n, 3), group)
        assert ops._low_contention_all_gather_ce_multicast_out(part, group, out) is out
        assert torch.equal(out, whole)
    handle.barrier()


rank, size = dist.get_rank(), dist.get_world_size()
if HOW == "list":
    check_list()
else:
    symm.use_in_torch()
    symm_mem.set_backend("NCCL")
    evens = dist.new_group(list(range(0, size, 2)))
    parts = [(rank, size, dist.group.WORLD.group_name)]
    if rank % 2 == 0 and size > 2:
        parts.append((rank // 2, (size + 1) // 2, evens.group_name))
    for part in parts:
        for kind in (torch.float32, torch.bfloat16):
            check_plain(*part, kind)
        check_float8_gather(*part)
        check_float8_scatter(*part)
        check_refusals(*part)
        check_signals(*part)
        check_newer(*part)
    say("over")
dist.destroy_process_group()
if BACKEND == "gloo":
    leave()
