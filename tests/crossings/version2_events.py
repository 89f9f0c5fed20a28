"""What happens between two steps in version 2, and the same in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from crossings.alone import Alone
from crossings.training import Training, grouped, make_optimizer

if TYPE_CHECKING:
    from crossings.case import Event
    from crossings.nets import Batch
    from crossings.version2_case import Version2Case


class Version2Events(Training):
    """Events that a job and one process have in common; the topology before one of them is :attr:`former`."""

    case: Any
    former = ""

    def apply(self, event: Event) -> None:
        """See :class:`Training`."""
        self.former = self.topology
        super().apply(event)

    @torch.no_grad()
    def evaluate(self, step: int) -> None:
        """See :class:`Training`; FSDP gathers no parameters in inference mode."""
        self.model.eval()
        self.record.scores.append(self.score(self.batch(99)))
        self.model.train()

    @torch.no_grad()
    def change_weights(self, step: int) -> None:
        """The script writes into parameters, or the parts that it has."""
        for p in self.model.parameters():
            if step % 2:
                p.mul_(0.9)
            else:
                p.clamp_(-0.3, 0.3)

    @torch.no_grad()
    def summon_weights(self, step: int) -> None:
        """The script gathers parameters, and writes into them."""
        for p in self.model.parameters():
            p.add_(0.01)


class AloneInVersion2(Version2Events, Alone):
    """One process, in plain PyTorch.

    Args:
        first: weights to begin with, if ranks draw them when they shard.
    """

    def __init__(self, case: Version2Case, first: dict[str, torch.Tensor]) -> None:
        given: Any = case
        super().__init__(given)
        if case.delayed == "meta":
            self.model.load_state_dict(first)
            self.record.first = self.weights()

    def backward(self, batch: Batch) -> float:
        """See :class:`Training`; each replica keeps its own running statistics."""
        found = self._mean(batch, self.loss, lambda loss, pieces: (loss / pieces / self.case.passes).backward())
        for p in self.model.parameters():  # FSDP updates what no sample of this pass has reached
            if p.grad is None and p.requires_grad and self.case.shards_by == "wrapper":
                p.grad = torch.zeros_like(p)
        return found

    def resume_full(self, step: int) -> None:
        """See :class:`Version2Case`; full state has the moments only without split parameters and shared experts."""
        self.resume_sharded(step)
        if not self.case.keeps_moments(self.former, self.topology):
            self.optimizer = self.make_optimizer()

    def resume_sharded(self, step: int) -> None:
        """See :class:`Alone`."""
        self.resume_partial(step)

    resume_async = resume_local = resume_sharded

    def reload_state(self, step: int) -> None:
        """See :class:`Training`; replicas load the first one's buffers."""
        self._statistics.clear()
        super().reload_state(step)
        if not self.case.keeps_moments(self.topology, self.topology):
            self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """See :class:`Training`."""
        return optimizer_of(self.case, dict(self.model.named_parameters()))


def optimizer_of(case: Version2Case, parameters: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of a case; FSDP keeps no attributes of parameters, so names choose the groups."""
    if not case.grouped:
        return make_optimizer(case.optimizer, list(parameters.values()))
    for name, parameter in parameters.items():
        parameter.is_slow = name.endswith("bias")  # type: ignore[attr-defined]
    return make_optimizer(case.optimizer, grouped(list(parameters.values())))
