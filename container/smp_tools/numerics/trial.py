"""Additions of ``smp-estimator verify`` to a recorded run: seeds, no dropout, the other run's batches, a few steps."""

from __future__ import annotations

import logging
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config import Group
from smp_runtime.errors import SMPRuntimeError
from smp_runtime.step.microbatches import counts_of_all
from smp_runtime.tensors.torch_private import tree_flatten, tree_unflatten
from smp_tools.numerics.module_watch import owner_of

if TYPE_CHECKING:
    from smp_records.numerics import Trial
    from smp_runtime.job.session import Session
    from smp_runtime.job.trained import TrainedOptimizer

logger = logging.getLogger("smp")

_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


class TrialRun:
    """Follows a training of a few steps on this rank; comes behind the recorder, which has written when the script ends."""

    def __init__(self, session: Session, trial: Trial) -> None:
        self._session, self._trial = session, trial
        self._calls = 0
        self._stilled: set[int] = set()
        seed_everything(trial.seed)
        session.before_step.append(self.without_dropout)
        session.after_update.append(self.updated)
        if trial.save:
            session.arguments.append(self.save)
        if trial.replay:
            session.arguments.append(self.replay)

    def without_dropout(self) -> None:
        """Set all dropout rates to 0, because ranks at different degrees draw different numbers for dropout."""
        for model in self._session.models:
            if id(model) not in self._stilled:
                self._stilled.add(id(model))
                disable_dropout(model.module)

    def updated(self, optimizer: TrainedOptimizer) -> None:
        """End the script after the requested number of updates; all ranks end after the same update."""
        if self._session.progress.step >= self._trial.steps:
            logger.info("smp-estimator verify ends the script after %d updates", self._trial.steps)
            sys.exit(0)

    def save(self, values: list[Any], axes: list[int | None]) -> list[Any]:
        """Write the tensors among a step's arguments, once per batch that the ranks read."""
        ranks = self._session.ranks
        # The stages of a pipeline read one batch; so do tensor parallel ranks, if it is prescaled.
        first_of_batch = ranks.rank_in(Group.PP) == 0 and (
            not ranks.cfg.prescaled_batch or ranks.rank_in(Group.TP) == 0
        )
        if first_of_batch:
            found = [
                _whole(leaf, ranks.cfg.microbatches).detach().cpu() if isinstance(leaf, torch.Tensor) else None
                for leaf in tree_flatten(values)[0]
            ]
            folder = Path(self._trial.save)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(found, folder / _file(self._calls, owner_of(ranks)))
        self._calls += 1
        return values

    def replay(self, values: list[Any], axes: list[int | None]) -> list[Any]:
        """Return the batches of the other run's ranks, concatenated along the axes that are divided.

        Raises:
            SMPRuntimeError: the other run has not called this step.
        """
        files = sorted(Path(self._trial.replay).glob(_file(self._calls, None)))
        if not files:
            raise SMPRuntimeError(
                f"step {self._calls} was not called in the run at the wanted degrees, whose batches this run takes; a script whose "
                "steps depend on the number of ranks cannot be compared with one process"
            )
        read = [torch.load(file, weights_only=True) for file in files]
        self._calls += 1
        made: list[Any] = []
        at = 0
        for value, axis in zip(values, axes, strict=True):
            leaves, shape = tree_flatten(value)
            parts = [one[at : at + len(leaves)] for one in read]
            at += len(leaves)
            made.append(
                tree_unflatten(
                    [_joined(leaf, list(same), axis) for leaf, *same in zip(leaves, *parts, strict=True)], shape
                )
            )
        return made


def _whole(leaf: torch.Tensor, microbatches: int) -> torch.Tensor:
    """Return the value to write for an argument: if it is a count for each microbatch, the count for all of them."""
    return leaf if counts_of_all(leaf) is None else leaf * microbatches


def _joined(leaf: Any, parts: list[torch.Tensor | None], axis: int | None) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    tensors = [part for part in parts if part is not None]
    if len(tensors) < len(parts):
        return leaf
    if counts_of_all(leaf) is False:  # each replica counts its own
        return torch.stack(tensors).sum(0).to(leaf.device)
    whole = tensors[0]
    if axis is not None and whole.dim():
        whole = torch.cat(tensors, axis)
    return whole.to(leaf.device)


def _file(call: int, owner: int | None) -> str:
    return f"step{call:06}-" + ("*" if owner is None else f"{owner:05}") + ".pt"


def seed_everything(seed: int) -> None:
    """Seed the generators of PyTorch and Python, and NumPy's if the script has imported it."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


def disable_dropout(module: nn.Module) -> list[str]:
    """Set the dropout rates in a model to 0, those of layers and numbers that modules keep; returns their names."""
    found = []
    for path, part in module.named_modules():
        names = [name for name, value in vars(part).items() if _is_dropout_rate(name, value)]
        if isinstance(part, _DROPOUTS) and part.p > 0:
            names.append("p")
        for name in names:
            setattr(part, name, 0.0)
            found.append(f"{path}.{name}".lstrip("."))
    return found


def _is_dropout_rate(name: str, value: Any) -> bool:
    if "drop" not in name.lower():
        return False
    return isinstance(value, float) and value > 0
