"""transformers: Trainer on a tiny GPT-2 that is made here, with evaluation and a checkpoint."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from tests.compat.programs.result import report

torch.manual_seed(1)


class Tokens(torch.utils.data.Dataset):
    """Sequences that count upwards from a random token."""

    def __init__(self, length):
        first = torch.randint(0, 64, (length, 1))
        self.rows = (first + torch.arange(16)) % 64

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=4,
        max_steps=8,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=8,
        learning_rate=1e-2,
        report_to=[],
        seed=1,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(64), eval_dataset=Tokens(16))
    assert trainer.args.world_size == 2, trainer.args.world_size
    trainer.train()
    torch.distributed.barrier()
history = trainer.state.log_history
report([row[key] for row in history for key in ("loss", "eval_loss") if key in row], model.state_dict())
torch.distributed.destroy_process_group()
