"""What `rally ps` shows of a training run by the Trainer of transformers, midway."""

import sys
import tempfile

import shown
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from rallypoint.integrations.transformers import ProgressCallback


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"input_ids": torch.arange(3, 11), "labels": index % 2}


class Looks(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 6:
            shown.write(sys.argv[1])


config = BertConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=8,
        num_train_epochs=2,
        save_strategy="no",
        logging_steps=2,
        report_to=[],
        disable_tqdm=True,
    )
    model = BertForSequenceClassification(config)
    Trainer(
        model, arguments, train_dataset=Samples(), callbacks=[ProgressCallback(), Looks()]
    ).train()
