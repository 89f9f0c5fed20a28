"""Regions on the stages of a pipeline: each runs, and runs again, on the stage of its modules.

Neighbours of an ``nn.Sequential`` that are on another stage than the ``nn.Sequential`` itself are called together, as one
request to a :class:`RegionGroup`, a module that only the pipeline knows. Inside, every member draws the random numbers that
it would draw if it were called alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from smp_runtime.activations.activations import Activations
from smp_runtime.activations.marking import marked_parts
from smp_runtime.activations.regions import run_region
from smp_runtime.errors import SMPUserError
from smp_runtime.pipeline.transport.messages import GroupCall
from smp_runtime.tensors.random_state import RandomState, task_seed

if TYPE_CHECKING:
    from smp_runtime.pipeline.execution.rank_pipeline import Pipeline

logger = logging.getLogger("smp")


class RegionPlacement:
    """The stages of a model's regions.

    Args:
        is_manual: whether the script has chosen the stages; a region that they split is an error then.

    Attributes:
        groups: number of requests to groups on other stages.
    """

    def __init__(self, pipeline: Pipeline, *, is_manual: bool) -> None:
        self.pipeline = pipeline
        self.groups = 0
        self._context = pipeline.context
        self._is_manual = is_manual
        self._whole: dict[int, int | None] = {}
        self._told: set[str] = set()
        self._context.make_group = self._group

    @property
    def stage(self) -> int:
        """Return this rank's stage."""
        return self._context.stage

    def stage_of(self, module: nn.Module) -> int | None:
        """Return the stage of a module with all its submodules, or None if it is on several.

        For a module that does not belong to the model, return this rank's stage.
        """
        found = self._whole.get(id(module), -1)
        if found == -1:
            stages = self._stages(module)
            found = self._whole[id(module)] = next(iter(stages)) if len(stages) == 1 else None
        return found

    def _stages(self, module: nn.Module) -> set[int]:
        stages = set()
        for part in module.modules():
            path = self._context.paths.get(id(part))
            stages.add(self.stage if path is None else self._context.stage_of(path))
        return stages

    def check(self, model: nn.Module) -> None:
        """Look for checkpointed modules that the partition has split.

        Raises:
            SMPUserError: there is one, and the script has set the stages.
        """
        for module in marked_parts(model):
            if self.stage_of(module) is None:
                self.tell_split(module)

    def tell_split(self, module: nn.Module) -> None:
        """Warn once that a module is not checkpointed because it is on several stages.

        Raises:
            SMPUserError: the script has set the stages.
        """
        path = self._context.paths.get(id(module), type(module).__name__) or "the whole model"
        if path in self._told:
            return
        stages = sorted(self._stages(module))
        text = (
            f"{path!r} is to be checkpointed, but its modules lie on the stages {', '.join(map(str, stages))}, and a region is "
            "run again where it lies"
        )
        if self._is_manual:
            raise SMPUserError(
                f"{text}; checkpoint the modules inside it, or set all of it to one stage with smp.partition or smp.set_partition",
                code="SMP303",
            )
        self._told.add(path)
        if self.pipeline.is_root and self._context.replica == 0:
            logger.warning(
                "%s: it runs without checkpointing; checkpoint the modules inside it, or keep it together with smp.set_partition",
                text,
            )

    # -- calls -----------------------------------------------------------------------------------------------------

    def remote_calls(self) -> int:
        """Return the number of modules of other stages that the running task has called so far."""
        task = self._context.scheduler.current
        return 0 if task is None else task.calls

    def where(self) -> tuple[Any, Any, Any] | None:
        """Return place and action of the running task, and the planned order; None outside tasks."""
        scheduler = self._context.scheduler
        task, order = scheduler.current, scheduler.order
        if task is None:
            return None
        return (task.microbatch, task.path), task.action, None if order is None else order.actions

    def call(
        self, members: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], preserve_rng_state: bool
    ) -> Any:
        """Call modules of another stage one after the other, as one region there."""
        paths = [self._context.paths[id(member)] for member in members]
        group = GroupCall(tuple(paths), preserve_rng_state)
        self._context.called(group).training = members[0].training
        numbers = []
        task = self._context.scheduler.current
        if task is not None:
            for member in paths:
                numbers.append(task.called.get(member, 0))
                task.called[member] = numbers[-1] + 1
        self.groups += 1
        return self.pipeline.caller.call(group, (tuple(numbers), args, kwargs), {})

    def seed(self, path: str, number: int) -> int:
        """Return the seed of a module that the running task's caller has called ``number`` times before."""
        task = self._context.scheduler.current
        if task is None:
            raise AssertionError("groups are only called by tasks")
        return task_seed(self._context.seed, self._context.replica, task.microbatch, path, number)

    def _group(self, call: GroupCall) -> nn.Module:
        return RegionGroup([(path, self._context.modules[path]) for path in call.members], self, call)


class RegionGroup(nn.Module):
    """Modules of one stage that are called one after the other, as one region."""

    def __init__(self, members: Sequence[tuple[str, nn.Module]], placement: RegionPlacement, call: GroupCall) -> None:
        super().__init__()
        self._members = list(members)  # in a plain list: they belong to the model
        self._placement = placement
        self._preserve = call.preserve_rng_state
        self._label = str(call)

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Yield this module and the modules of its members, so that their flags go with a call."""
        yield self
        for _, member in self._members:
            yield from member.modules()

    def forward(self, numbers: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the members.

        Args:
            numbers: how often the caller has called each before, for their random numbers.
            args: of the first member; each of the others gets the result of the one before.
            kwargs: of the first member.
        """
        seeds = [self._placement.seed(path, number) for (path, _), number in zip(self._members, numbers, strict=True)]
        here = Activations.here()
        chain = functools.partial(_chain, [module for _, module in self._members], seeds, here.device)
        return run_region(chain, args, kwargs, here, preserve_rng_state=self._preserve, label=self._label)


def _chain(members: Sequence[nn.Module], seeds: Sequence[int], device: Any, *args: Any, **kwargs: Any) -> Any:
    for member, seed in zip(members, seeds, strict=True):
        RandomState(seed, device).restore()
        args, kwargs = (member(*args, **kwargs),), {}
    return args[0]
