"""accelerate: a training loop with gradient accumulation, clipping and metrics gathered from all ranks."""

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from torch.utils.data import DataLoader, TensorDataset

from tests.compat.programs.result import report

set_seed(1)
accelerator = Accelerator(
    cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)]
)
assert accelerator.num_processes == 2, accelerator.num_processes
x = torch.randn(96, 16)
data = TensorDataset(x, (x.sum(1) > 0).long())
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
model, optimizer, loader, schedule = accelerator.prepare(
    model, optimizer, DataLoader(data, batch_size=8, shuffle=True), schedule
)
losses = []
for _epoch in range(2):
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean"))
    outputs, targets = accelerator.gather_for_metrics((model(inputs).detach(), labels))
    assert len(outputs) == len(targets) == 16, len(outputs)
assert accelerator.gather_for_metrics([accelerator.process_index], use_gather_object=True) == [0, 1]
accelerator.wait_for_everyone()
report(losses, accelerator.unwrap_model(model).state_dict())
accelerator.end_training()
