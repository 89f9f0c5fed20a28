"""Trains a small Llama on the text in the channel ``train`` with Transformers' ``Trainer``, evaluates it, and resumes.

    python entrypoints/train_trainer.py --train FOLDER --output_dir FOLDER --max_steps 20

A script as one writes it with Transformers alone: nothing in it depends on how the job is distributed, and every argument of
``TrainingArguments`` is an argument of the script.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

BYTES = 256


@dataclass
class DataArguments:
    """What the script itself needs to know."""

    train: str = field(default=os.environ.get("SM_CHANNEL_TRAIN", ""), metadata={"help": "folder with .txt files"})
    model_dir: str = field(default=os.environ.get("SM_MODEL_DIR", "model"), metadata={"help": "of the trained model"})
    seq_len: int = field(default=64, metadata={"help": "bytes of a sample"})


def samples(data: DataArguments) -> list[dict[str, torch.Tensor]]:
    """Return the text in pieces of ``seq_len`` bytes."""
    text = b"".join(file.read_bytes() for file in sorted(Path(data.train).rglob("*.txt")))
    count = len(text) // data.seq_len
    if count < 8:
        raise ValueError(
            f"the train channel {data.train!r} has {len(text)} bytes in its .txt files, and 8 samples take {8 * data.seq_len}; "
            "give more text, or a smaller seq_len"
        )
    rows = torch.tensor(list(text[: count * data.seq_len])).view(count, data.seq_len)
    return [{"input_ids": row, "labels": row} for row in rows]


def make_model() -> LlamaForCausalLM:
    """``LlamaForCausalLM.from_pretrained("…")`` belongs in the place of this small one."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "max_position_embeddings": 128}
    return LlamaForCausalLM(LlamaConfig(vocab_size=BYTES, num_attention_heads=4, num_key_value_heads=2, **sizes))


def main() -> None:
    parser = HfArgumentParser((DataArguments, TrainingArguments))
    data, training, _ = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    set_seed(training.seed)
    rows = samples(data)
    held_out = max(len(rows) // 20, 4)
    trainer = Trainer(model=make_model(), args=training, train_dataset=rows[:-held_out], eval_dataset=rows[-held_out:])
    last = get_last_checkpoint(training.output_dir) if os.path.isdir(training.output_dir) else None
    trainer.train(resume_from_checkpoint=last)
    metrics = trainer.evaluate()
    trainer.save_model(data.model_dir)
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found = {"losses": losses, "eval_loss": metrics["eval_loss"]}
        Path(data.model_dir, "metrics.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
