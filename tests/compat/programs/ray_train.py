"""Ray Train: two workers on the CPU train with DDP through Ray's own set-up of torch.distributed."""

import json
import tempfile
from pathlib import Path

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.utils.data import DataLoader, TensorDataset


def work(config):
    import torch.distributed as dist

    torch.manual_seed(1)
    x = torch.randn(96, 16)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    loader = ray.train.torch.prepare_data_loader(loader)
    model = ray.train.torch.prepare_model(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    if dist.get_rank() == 0:
        found = {"losses": losses, "weights": "", "group": type(dist.group.WORLD).__name__}
        Path(config["result"]).write_text(json.dumps(found))
    ray.train.report({"loss": losses[-1]})


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            work,
            train_loop_config={"result": f"{folder}/result"},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        print("RESULT " + Path(folder, "result").read_text(), flush=True)
    ray.shutdown()
