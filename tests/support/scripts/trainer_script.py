"""A script without a line of this library: Transformers' ``Trainer`` trains a small GPT-2 with dropout."""

from __future__ import annotations

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

WORDS, LENGTH = 43, 12


def samples(count):
    ids = torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": one, "labels": one} for one in ids]


def main():
    set_seed(1)
    arguments = TrainingArguments(
        output_dir=os.environ.get("SM_MODEL_DIR", "model"),
        per_device_train_batch_size=4,
        max_steps=50,
        learning_rate=1e-2,
        weight_decay=0.1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        max_grad_norm=0.0,
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=32, n_layer=2, n_head=4))
    Trainer(model=model, args=arguments, train_dataset=samples(64)).train()


if __name__ == "__main__":
    main()
