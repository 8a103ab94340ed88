import sys
import tempfile

import torch
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1, resid_pdrop=0.0))
rows = TensorDataset(torch.randint(32, (32, 8)))
arguments = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=4, num_train_epochs=1, report_to=[])
trainer = Trainer(
    model, arguments, train_dataset=rows,
    data_collator=lambda batch: dict.fromkeys(("input_ids", "labels"), torch.stack([row for (row,) in batch])),
)  # fmt: skip
trainer.train()
print(f"WORLD trainer {arguments.process_index} {arguments.world_size}\n", end="", flush=True)
if trainer.is_world_process_zero():
    torch.save(model.state_dict(), sys.argv[1])
