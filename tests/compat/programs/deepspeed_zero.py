"""DeepSpeed: ZeRO of the stage that the argument names, gradient clipping, and a checkpoint read back."""

import sys

import deepspeed
import torch
import torch.distributed as dist

from tests.compat.programs.result import report, shared_folder

stage = int(sys.argv[1])
deepspeed.init_distributed("gloo")
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": stage},
    "zero_allow_untested_optimizer": True,
}
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), config=config
)
torch.manual_seed(10 + dist.get_rank())
losses = []


def step():
    x = torch.randn(8, 16)
    loss = torch.nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(total / dist.get_world_size())


for _ in range(4):
    step()
with shared_folder() as folder:
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
for _ in range(2):
    step()
with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
    report(losses, model.state_dict())
dist.destroy_process_group()
