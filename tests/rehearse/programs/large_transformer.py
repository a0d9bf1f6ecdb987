"""A transformer in FSDP2 and tensor parallel, written for GPUs. It ends when its memory exceeds a limit.

Arguments: `width`, `blocks`, ranks that share a tensor, the limit in MB for what the program adds,
and the tokens of a batch.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

width, blocks, shared, limit, tokens = map(int, sys.argv[1:])
WORDS, HEAD = 32000, 128


def used():
    """Returns the MB of memory of this process that exist."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6


before = used()


def check():
    if used() - before > limit:
        raise MemoryError(f"{used() - before:.0f} MB are more than {limit}")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.LayerNorm(width)
        self.qkv = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        check()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        check()

    def attend(self, x):
        q, k, v = (one(x).view(*x.shape[:2], -1, HEAD).transpose(1, 2) for one in self.qkv)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        check()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, words):
        x = self.words(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
shape = (dist.get_world_size() // shared, shared)
mesh = init_device_mesh("cuda", shape, mesh_dim_names=("data", "tensor"))
torch.manual_seed(0)
with torch.device("cuda"):
    model = Model()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.blocks:
    if shared > 1:
        plan = {f"qkv.{i}": ColwiseParallel() for i in range(3)} | {"out": RowwiseParallel()}
        plan |= {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tensor"], plan)
    fully_shard(block, mesh=mesh["data"], mp_policy=policy)
fully_shard(model, mesh=mesh["data"], mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
for _ in range(2):
    words = torch.randint(0, WORDS, (1, tokens), device="cuda")
    loss = functional.cross_entropy(model(words).flatten(0, 1).float(), words.flatten())
    assert torch.isfinite(loss)
    loss.backward()
    if shared == 1:
        assert torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor())
    optimizer.step()
    optimizer.zero_grad()
    check()
    dist.all_reduce(loss.detach(), dist.ReduceOp.AVG)
dist.destroy_process_group()
