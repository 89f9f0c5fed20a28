"""The ``Accelerator`` of a ``Trainer``: for Accelerate the processes are the data parallel ranks of this job."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import recursively_apply

from smp_config import Group
from smp_runtime.job import session as sessions
from smp_runtime.model.distributed_model import DistributedModel
from smp_runtime.optim.distributed_optimizer import DistributedOptimizer


class TrainerAccelerator(Accelerator):  # type: ignore[misc]
    """Shards data and gathers results over the ranks that read different batches.

    That is the data parallel group, or with ``prescaled_batch`` the reduced one. Accelerate itself sees one process, and
    neither wraps the model nor casts: this library does.

    Args:
        trainer: makes the optimizer when this is asked to prepare it and there is none.
        options: as for ``Accelerator``.
    """

    def __init__(self, trainer: Any, **options: Any) -> None:
        loaders = options.get("dataloader_config")
        if loaders is not None:
            if loaders.dispatch_batches:
                sessions.say_once(
                    "dispatch_batches ignored: every rank reads the data set itself and takes its own batches; leave it out"
                )
            loaders.dispatch_batches = False
        super().__init__(**{**options, "mixed_precision": "no"})
        self._trainer = weakref.ref(trainer)

    # -- who reads what ------------------------------------------------------------------------------------------------

    @property
    def _readers(self) -> Group:
        return readers()

    @property
    def num_processes(self) -> int:
        """Ranks that read different batches."""
        return sessions.current().ranks.size(self._readers)

    @property
    def process_index(self) -> int:
        """Which of these batches this rank reads."""
        return sessions.current().ranks.rank_in(self._readers)

    @property
    def local_process_index(self) -> int:
        """Position on this host."""
        return sessions.current().ranks.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first rank of the job."""
        return sessions.current().ranks.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its host."""
        return sessions.current().ranks.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank of the job."""
        ranks = sessions.current().ranks
        return ranks.rank == ranks.size(Group.WORLD) - 1

    def wait_for_everyone(self) -> None:
        """Wait for all ranks of the job."""
        ranks = sessions.current().ranks
        ranks.control.barrier(ranks.members(Group.WORLD))

    # -- results of all readers ----------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Tensors of all readers, in any structure, joined along their first axis; all of them have equal shapes."""
        return recursively_apply(self._gathered, tensor, error_on_other_type=True)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        mine = tensor.detach()
        mine = (mine[None] if mine.dim() == 0 else mine).contiguous()
        if self.num_processes == 1:
            return mine
        ranks = sessions.current().ranks
        here = mine.to(ranks.device)
        everyone = [torch.empty_like(here) for _ in range(self.num_processes)]
        dist.all_gather(everyone, here, group=ranks.groups.group(self._readers))
        return torch.cat(everyone).to(tensor.device)

    def _everyone(self, value: Any) -> list[Any]:
        ranks = sessions.current().ranks
        return list(ranks.control.allgather(value, ranks.members(self._readers)))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What all readers have, without the samples that were there twice to make the last batches equal."""
        if not use_gather_object and _holds_only_tensors(input_data):
            return super().gather_for_metrics(input_data)
        joined = [item for part in self._everyone(input_data) for item in part]
        remainder = self.gradient_state.remainder
        return joined[:remainder] if self.gradient_state.end_of_dataloader and remainder > 0 else joined

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, or the mean, of tensors of all readers."""

        def reduced(one: torch.Tensor) -> torch.Tensor:
            stacked = self._gathered(one[None])
            total = stacked.sum(0) if reduction != "mean" else stacked.float().mean(0).to(one.dtype)
            return total * scale

        return tensor if reduction == "none" else recursively_apply(reduced, tensor, error_on_other_type=True)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors padded along ``dim`` to the longest that any reader has."""

        def padded(one: torch.Tensor) -> torch.Tensor:
            if one.dim() == 0 or not -one.dim() <= dim < one.dim() or self.num_processes == 1:
                return one
            missing = max(self._everyone(one.shape[dim])) - one.shape[dim]
            if not missing:
                return one
            shape = list(one.shape)
            shape[dim] = missing
            parts = [one, one.new_full(shape, pad_index)]
            return torch.cat(parts[::-1] if pad_first else parts, dim=dim)

        return recursively_apply(padded, tensor, error_on_other_type=True)

    # -- what this library does itself ---------------------------------------------------------------------------------

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """As ever; an optimizer of the trainer that nobody has made for the wrapped model is made first."""
        trainer = self._trainer()
        if trainer is not None and len(objects) == 1 and objects[0] is trainer.optimizer:
            if not isinstance(trainer.optimizer, DistributedOptimizer):
                trainer.create_optimizer()
            if not isinstance(trainer.optimizer, DistributedOptimizer):  # by a subclass
                trainer.optimizer = DistributedOptimizer(trainer.optimizer)
            objects = (trainer.optimizer,)
        return super().prepare(*objects, **options)

    def unwrap_model(self, model: Any, *args: Any, **options: Any) -> Any:
        """The model that the script gave."""
        trainer = self._trainer()
        if isinstance(model, DistributedModel):
            return trainer.model if trainer is not None and trainer.model_wrapped is model else model.module
        return super().unwrap_model(model, *args, **options)

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Gradients of the passes inside add up and are reduced by the first pass outside."""
        with model.no_sync() if isinstance(model, DistributedModel) else contextlib.nullcontext():
            yield

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Backward of a loss, with the loss scale of ``fp16``."""
        trainer = self._trainer()
        if trainer is not None and isinstance(trainer.model_wrapped, DistributedModel):
            trainer.model_wrapped.backward(loss, **options)
        else:
            super().backward(loss, **options)


def readers() -> Group:
    """Over which ranks batches differ."""
    return Group.RDP if sessions.current().ranks.cfg.prescaled_batch else Group.DP


def _holds_only_tensors(data: Any) -> bool:
    if isinstance(data, dict):
        return all(_holds_only_tensors(value) for value in data.values())
    if isinstance(data, Sequence) and not isinstance(data, str):
        return all(_holds_only_tensors(value) for value in data)
    return isinstance(data, torch.Tensor)
