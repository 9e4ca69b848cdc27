"""transformers' Trainer on a BERT of one layer, made up on the spot."""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

import wild


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(3, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {
            "input_ids": ids,
            "attention_mask": torch.ones(8, dtype=torch.long),
            "labels": index % 2,
        }


class Steps(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        wild.after_step(state.global_step)


config = BertConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
)
arguments = TrainingArguments(
    output_dir=str(wild.OUT / "checkpoints"),
    use_cpu=True,
    per_device_train_batch_size=8,
    num_train_epochs=wild.EPOCHS,
    save_strategy="epoch" if wild.MODE == "restart" else "no",
    logging_strategy="no",
    report_to=[],
    disable_tqdm=True,
    seed=1,
)
torch.manual_seed(0)
trainer = Trainer(
    BertForSequenceClassification(config), arguments, train_dataset=Samples(), callbacks=[Steps()]
)
last = get_last_checkpoint(arguments.output_dir) if (wild.OUT / "checkpoints").exists() else None
done = trainer.train(resume_from_checkpoint=last)
wild.finish(
    trainer.accelerator.unwrap_model(trainer.model),
    steps=trainer.state.global_step,
    # The mean is over the steps since the last start.
    loss=done.training_loss if last is None else None,
    mode=str(arguments.parallel_mode),
    resumed=last is not None,
)
