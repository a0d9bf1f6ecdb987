"""Lightning: Trainer.fit with DDP, synchronised logging, validation and a checkpoint."""

import tempfile

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.compat.programs.result import report


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        self.losses = []

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(self.all_gather(loss.detach()).mean())
        return loss

    def validation_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("validation", loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


lightning.seed_everything(1, verbose=False)
x = torch.randn(96, 16)
data = TensorDataset(x, (x.sum(1) > 0).long())
module = Classifier()
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=16))
    trainer.strategy.barrier()
assert trainer.world_size == 2, trainer.world_size
report([*module.losses, trainer.callback_metrics["validation"]], module.state_dict())
torch.distributed.destroy_process_group()
