"""Trains adapters (LoRA) of a small Llama on the text in the channel ``train``: by supervised fine-tuning, or from preferences.

    python entrypoints/train_lora.py --sm-channel-train FOLDER --sm-model-dir FOLDER --steps 20

With ``--packed 64`` a row of a batch has several samples, which do not see each other, and 64 words at most: for long rows,
which ranks share out with ``context_parallel_degree``.

A script as one writes it with Transformers, PEFT and TRL: nothing in it depends on how the job is distributed. It needs no
download: the base model is made from a configuration and a seed, and the tokenizer knows the words of the text.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

WORDS_IN_A_SAMPLE = 12


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    environ = os.environ
    parser.add_argument("--sm-channel-train", default=environ.get("SM_CHANNEL_TRAIN"), help="folder with .txt files")
    parser.add_argument("--sm-model-dir", default=environ.get("SM_MODEL_DIR", "model"), help="where adapters are saved")
    parser.add_argument("--objective", choices=("sft", "dpo"), default="sft", help="default: sft")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--batch", type=int, default=8, help="samples per data parallel rank and step (default: 8)")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters; 0 trains the model (default: 8)")
    parser.add_argument("--packed", type=int, default=0, help="words in a row of packed samples, for sft (default: 0)")
    return parser.parse_known_args()[0]


def samples(folder: str) -> list[str]:
    """Return the text in pieces of some words."""
    text = " ".join(file.read_text(errors="replace") for file in sorted(Path(folder).glob("*.txt")))
    words = re.findall(r"[A-Za-z]+", text.lower())[:20_000]
    return [" ".join(words[start : start + WORDS_IN_A_SAMPLE]) for start in range(0, len(words), WORDS_IN_A_SAMPLE)]


def tokenizer_of(texts: list[str]) -> hf.PreTrainedTokenizerFast:
    """Make a tokenizer of whole words, the most frequent ones."""
    counts = Counter(word for text in texts for word in text.split())
    words = ["<pad>", "<eos>", "<unk>", *(word for word, _ in counts.most_common(500))]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def base_model(vocabulary: int) -> Any:
    """Make the model whose weights stay as they are; the same seed makes the same model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=vocabulary, **sizes, **heads, **tokens))


def main() -> None:
    args = arguments()
    texts = samples(args.sm_channel_train)
    tokenizer = tokenizer_of(texts)
    settings: dict[str, Any] = {
        "output_dir": str(Path(args.sm_model_dir) / "trainer"),
        "per_device_train_batch_size": args.batch,
        "max_steps": args.steps,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "bf16": False,
        "seed": 0,
    }
    trained: dict[str, Any] = {
        "model": base_model(len(tokenizer)),
        "processing_class": tokenizer,
    }
    if args.rank:
        trained["peft_config"] = LoraConfig(
            r=args.rank, lora_alpha=2 * args.rank, task_type="CAUSAL_LM", target_modules="all-linear"
        )
    if args.objective == "sft":
        data = Dataset.from_dict({"text": texts})
        if args.packed:
            settings |= {"packing": True, "max_length": args.packed}
        trainer = SFTTrainer(args=SFTConfig(**settings), train_dataset=data, **trained)
    else:  # words as they are in the text are preferred to the same words in reverse
        halves = [(text.split()[:4], text.split()[4:]) for text in texts]
        data = Dataset.from_dict(
            {
                "prompt": [" ".join(start) for start, _ in halves],
                "chosen": [" ".join(rest) for _, rest in halves],
                "rejected": [" ".join(rest[::-1]) for _, rest in halves],
            }
        )
        trainer = DPOTrainer(args=DPOConfig(**settings), train_dataset=data, **trained)
    trainer.train()
    trainer.save_model(args.sm_model_dir)
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        Path(args.sm_model_dir, "metrics.json").write_text(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()
