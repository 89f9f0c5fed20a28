"""Whole tensors of one module in one step, as files: what ``smp-estimator diff --bisect`` looks at element by element."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from smp_records.numerics import CLOSEUP_PREFIX, INPUT, LOSS, KeptTensor
from smp_runtime.checkpoint.files.tensor_regions import TensorRegion
from smp_tools.numerics.sketch import plain_numbers, plain_region

if TYPE_CHECKING:
    import torch
    from torch import nn

    from smp_records.numerics import Closeup
    from smp_runtime.job.session import Session
    from smp_runtime.job.trained import TrainedOptimizer
    from smp_tools.numerics.journal import ValueOwner

logger = logging.getLogger("smp")

#: What modules of attention call their number of heads.
_HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "heads")


class TensorFiles:
    """Writes what this rank has of the tensors that were asked for, and ends the script behind the update of their step."""

    outlives_regrouping = True

    def __init__(self, session: Session, asked: Closeup) -> None:
        self._session, self._asked = session, asked
        self._folder = Path(asked.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._index = self._folder / f"{CLOSEUP_PREFIX}{session.ranks.rank:05}.jsonl"
        self._count = 0
        self._before: dict[ValueOwner, torch.Tensor] = {}
        session.after_update.append(self.updated)

    def keep(
        self, at: tuple[int, int], place: ValueOwner, tensor: torch.Tensor, factor: float, region: TensorRegion | None
    ) -> None:
        """Write a tensor down, if it was asked for.

        Args:
            at: updates before it, and calls of a step since the last one.
            factor: what its elements are multiplied with.
            region: of the whole tensor; None for one of a batch, and for all of it.
        """
        if at[0] == self._asked.step and self._is_wanted(place):
            self._write(at[1], place, _wide(tensor) * factor, tensor, region)

    def before_update(self, at: tuple[int, int], place: ValueOwner, tensor: torch.Tensor) -> None:
        """Keep a copy of a parameter that the optimizer is about to update."""
        if at[0] == self._asked.step and self._is_wanted(place):
            self._before[place] = _wide(tensor)

    def after_update(self, at: tuple[int, int], place: ValueOwner, tensor: torch.Tensor, region: TensorRegion) -> None:
        """Write the change of a parameter in the update."""
        former = self._before.pop(place, None)
        if former is not None:
            changed = _wide(tensor) - former
            self._write(at[1], place, changed, tensor, region)

    def updated(self, optimizer: TrainedOptimizer) -> None:
        """End the script after the requested step's update; all ranks end after the same update."""
        if self._session.progress.step > self._asked.step:
            logger.info("smp-estimator diff --bisect ends the script after update %d", self._session.progress.step)
            sys.exit(0)

    def _is_wanted(self, place: ValueOwner) -> bool:
        module = self._asked.module
        return place.phase in (INPUT, LOSS) or place.name == module or place.name.rpartition(".")[0] == module

    def _write(
        self, call: int, place: ValueOwner, values: torch.Tensor, of: torch.Tensor, region: TensorRegion | None
    ) -> None:
        whole = TensorRegion.of(tuple(values.shape)) if region is None else plain_region(region, of)
        file = f"{self._index.stem}-{self._count:05}.npy"
        self._count += 1
        np.save(self._folder / file, values.cpu().numpy().reshape(-1), allow_pickle=False)
        kept = KeptTensor(
            *place[:5],
            call=call,
            rank=self._session.ranks.rank,
            dtype=str(of.dtype).removeprefix("torch."),
            shape=list(whole.shape),
            axis=whole.axis,
            cuts=list(whole.cuts),
            flat=[whole.first, whole.last],
            heads=self._heads_of(place.name),
            file=file,
        )
        # After the tensor's own file: whatever the index names is there.
        with self._index.open("a", encoding="utf-8") as index:
            index.write(json.dumps(asdict(kept)) + "\n")

    def _heads_of(self, name: str) -> int:
        """Return the number of attention heads of the innermost module around a tensor that has one, or 0."""
        while name:
            for model in self._session.models:
                modules = dict(model.module.named_modules())
                heads = _attention_heads(modules.get(name))
                if heads is not None:
                    return heads
            name = name.rpartition(".")[0]
        return 0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return plain_numbers(tensor).double()


def _attention_heads(module: nn.Module | None) -> int | None:
    """Return the number of attention heads that a module has, or None."""
    for word in _HEADS:
        if hasattr(module, word):
            heads = getattr(module, word)
            # A flag is an ``int`` in Python, and no number of heads.
            if isinstance(heads, bool) or not isinstance(heads, int):
                return None
            return heads
    return None
