"""Programs that say `cuda`, on machines without a GPU."""

import pytest
import torch
import torch.distributed as dist

from tests.rehearse.test_meta_rehearsals import operations
from tests.rehearse.test_rehearsals import rehearsed
from unicomm.flight_recorder.analysis.verdict import Verdict

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("meta", [False, True])
def test_a_program_for_gpus_issues_what_it_issues_on_the_cpu(meta):
    on_gpu = rehearsed("ddp_on_a_device", 2, arguments=("cuda",), meta=meta, simulate_cuda=True)
    on_cpu = rehearsed("ddp_on_a_device", 2, arguments=("cpu",), meta=meta)
    assert on_gpu.good, (on_gpu.unusable, on_gpu.report.findings, on_gpu.output)
    assert operations(on_gpu) == operations(on_cpu)


def test_ways_to_say_cuda():
    def program():
        dist.init_process_group("cpu:gloo,cuda:nccl")
        tensors = [
            torch.zeros(3, device="cuda:0"),
            torch.tensor([1.0], device=torch.device("cuda", 0)),
            torch.zeros(3).cuda(),
            torch.zeros(3).to("cuda", torch.float16),
            torch.zeros(3).to(0),
            torch.zeros(3).new_zeros(3, device="cuda"),
            torch.nn.Linear(2, 2).to(0).weight,
            torch.nn.Linear(2, 2).cuda().weight,
            torch.nn.Linear(2, 2, device="cuda").weight,
            torch.randn(3, generator=torch.Generator("cuda").manual_seed(1), device="cuda"),
            torch.cuda.FloatTensor([1.0]),
            torch.zeros(3).new_tensor(3),
            torch.zeros(3).new_tensor([1, 2], device="cuda:1"),
            torch.zeros(3).type("torch.cuda.DoubleTensor"),
        ]
        with torch.device("cuda"):
            tensors.append(torch.ones(2))
        for tensor in tensors:
            dist.all_reduce(tensor.detach())
        for method in (torch.cuda.empty_cache, torch.cuda.synchronize, torch.cuda.reset_peak_memory_stats):
            method()
        torch.cuda.manual_seed_all(3)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        end.record()
        assert begin.elapsed_time(end) > 0
        assert torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info()[1]
        assert torch.ones(3).pin_memory().is_pinned() is False
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            q = torch.randn(1, 2, 8, 16, device="cuda")
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
        group = dist.new_group([0, 1], backend="nccl")
        dist.barrier(group, device_ids=[0])

    done = rehearsed(program, 2, simulate_cuda=True)
    assert done.good, (done.unusable, done.report.findings, done.output)
    assert len(done.table) == 2 * 16


def test_fsdp_and_own_communicators_on_gpus():
    def program():
        from torch.distributed.fsdp import FullyShardedDataParallel

        import unicomm

        dist.init_process_group("nccl")
        model = FullyShardedDataParallel(torch.nn.Linear(64, 64), device_id=torch.cuda.current_device())
        model(torch.ones(2, 64, device="cuda")).sum().backward()
        with unicomm.new_comm("nccl", torch.device("cuda"), name="own") as comm:
            comm.all_reduce(torch.ones(4, device="cuda"), unicomm.ReduceOp.SUM, async_op=False)

    done = rehearsed(program, 2, simulate_cuda=True)
    assert done.good, (done.unusable, done.report.findings, done.output)


def test_torch_itself_sees_no_gpu():
    def program():
        import torch.utils.data.dataloader  # whose loaders ask for an accelerator

        dist.init_process_group("nccl")
        data = torch.utils.data.TensorDataset(torch.ones(8, 2))
        for (batch,) in torch.utils.data.DataLoader(data, 4, pin_memory=True):
            dist.all_reduce(batch.cuda(non_blocking=True))

    assert rehearsed(program, 2, simulate_cuda=True).good


def test_a_gpu_that_a_node_does_not_have():
    def program():
        dist.init_process_group("nccl")
        torch.cuda.set_device(2)

    done = rehearsed(program, 2, simulate_cuda=True)
    finding = done.report.findings[0]
    assert finding.verdict is Verdict.EXCEPTION
    assert "a node of this rehearsal has 2 GPUs" in finding.sentence


def test_what_only_a_gpu_can_is_one_sentence():
    def program():
        dist.init_process_group("nccl")
        norm = torch.nn.SyncBatchNorm(4).cuda()
        torch.nn.parallel.DistributedDataParallel(norm)

    done = rehearsed(program, 2, simulate_cuda=True)
    assert done.unusable.startswith("the program needs a GPU, and this machine has none.")
    assert f"{__file__}:{program.__code__.co_firstlineno + 3}" in done.unusable
