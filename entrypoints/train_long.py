"""Trains a byte-level GPT on long samples of the ``train`` channel, and measures what a rank keeps for backward.

With ``context_parallel_degree`` ranks share each sample out; nothing in this script depends on it. Writes ``metrics.json`` into
the model folder: losses, and the bytes that the forward pass of a step leaves for its backward pass.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from train_gpt import GPT, VOCABULARY, GPTConfig

import smdistributed.modelparallel.torch as smp


class KeptBytes:
    """Counts the memory of the tensors that a forward pass keeps for backward, without that of ``excluded`` parameters."""

    def __init__(self, excluded: torch.nn.Module) -> None:
        self._excluded = {parameter.untyped_storage().data_ptr() for parameter in excluded.parameters()}
        self._seen: dict[int, int] = {}

    @property
    def total(self) -> int:
        """Return the bytes so far."""
        return sum(self._seen.values())

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count in the block."""
        self._seen.clear()
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
            yield

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._excluded:
            self._seen[storage.data_ptr()] = storage.nbytes()
        return tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--seq_len", type=int, default=1024, help="bytes per sample")
    parser.add_argument("--batch_size", type=int, default=1, help="samples per step and data parallel rank")
    parser.add_argument("--train", type=Path, default=os.environ.get("SM_CHANNEL_TRAIN"), help="folder of text")
    parser.add_argument("--model_dir", type=Path, default=os.environ.get("SM_MODEL_DIR", "model"))
    args = parser.parse_args()

    smp.init()
    torch.manual_seed(1)
    device = torch.device("cuda", smp.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    text = b"".join(path.read_bytes() for path in sorted(args.train.glob("**/*.txt")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    model = smp.DistributedModel(GPT(GPTConfig(layers=2, hidden=64, seq_len=args.seq_len)))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3))
    kept = KeptBytes(model)

    @smp.step
    def train_step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with kept.counting():
            logits = model(inputs)
            loss = F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))
        model.backward(loss)
        return loss

    losses: list[float] = []
    order = torch.Generator().manual_seed(2)
    for _ in range(args.steps):
        starts = torch.randint(len(data) - args.seq_len - 1, (args.batch_size * smp.dp_size(),), generator=order)
        # Ranks that share sequences out have one dp_rank, and so one batch.
        mine = starts.view(smp.dp_size(), -1)[smp.dp_rank()]
        rows = torch.stack([data[start : start + args.seq_len + 1] for start in mine]).to(device)
        optimizer.zero_grad()
        loss = train_step(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        optimizer.step()
        losses.append(float(loss.reduce_mean()))
    if smp.rank() == 0:
        course = f"loss {losses[0]:.3f} → {losses[-1]:.3f}"
        print(f"length {args.seq_len}, {smp.cp_size()} ranks a sequence: {course}, {kept.total:,} bytes kept")
        args.model_dir.mkdir(parents=True, exist_ok=True)
        facts = {"losses": losses, "kept_bytes": kept.total, "ranks_of_a_sequence": smp.cp_size()}
        (args.model_dir / "metrics.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
