"""A rank's checkpointed regions: where their inputs wait, and how they lie on the stages of a pipeline."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from smp_config import Group
from smp_runtime.activations.offloading import Offloader
from smp_runtime.job import session as sessions

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks

logger = logging.getLogger("smp")


class StagedRegions(Protocol):
    """The placement of a model's regions on the stages of a pipeline; the pipeline implements it.

    Attributes:
        groups: requests to groups of modules on other stages.
    """

    groups: int

    @property
    def stage(self) -> int:
        """Return this rank's stage."""

    def stage_of(self, module: nn.Module) -> int | None:
        """Return the stage of a module and its submodules, or None if they are on several.

        For a module that is not part of the model, return this rank's stage.
        """

    def check(self, model: nn.Module) -> None:
        """Look for checkpointed modules that the partition has split."""

    def tell_split(self, module: nn.Module) -> None:
        """Log once that a module is not checkpointed because it is on several stages."""

    def call(
        self, members: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], preserve_rng_state: bool
    ) -> Any:
        """Call modules of another stage one after the other, as one region there."""

    def remote_calls(self) -> int:
        """Return how many modules of other stages the running task has called so far."""

    def where(self) -> tuple[Any, Any, Any] | None:
        """Return place and action of the running task, and the planned order; None outside tasks."""


class Activations:
    """The checkpointed activations of one rank.

    Args:
        ranks: of the job; None before ``smp.init``, when regions are plain.

    Attributes:
        offloader: brings kept activations to CPU memory and back; None without ``offload_activations``.
        regions: how many have run.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self.device = torch.device("cpu") if ranks is None else ranks.device
        # The pipeline holds it, and through its model the session, which must not keep itself alive here.
        self._placement: weakref.ref[StagedRegions] | None = None
        self.offloader: Offloader | None = None
        self.regions = 0
        self._ranks = ranks
        self._steps = 0
        self._has_told = False
        if ranks is not None and ranks.cfg.offload_activations:
            self.offloader = Offloader(ranks.cfg.activation_loading_horizon, ranks.device, self._where)

    @classmethod
    def here(cls) -> Activations:
        """Return the instance of the running session, or a plain one before ``smp.init``."""
        if not sessions.is_initialized():
            return _plain
        ranks = sessions.current_session().ranks
        return ranks.keep(cls, lambda: cls(ranks))

    @property
    def placement(self) -> StagedRegions | None:
        """Return the placement of regions on pipeline stages; None without pipeline parallelism."""
        return None if self._placement is None else self._placement()

    @placement.setter
    def placement(self, value: StagedRegions) -> None:
        # The model holds its placement.
        self._placement = weakref.ref(value)

    def device_of(self, leaves: Iterable[Any]) -> torch.device:
        """Return the device that supplies a region's random numbers.

        That is this rank's device, or before ``smp.init`` the device of the arguments.
        """
        if self._ranks is not None:
            return self.device
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.device.type == "cuda":
                self.device = leaf.device
        return self.device

    def remote_calls(self) -> int:
        """Return how many modules of other stages the running task has called."""
        placement = self.placement
        return 0 if placement is None else placement.remote_calls()

    def _where(self) -> tuple[Any, Any, Any]:
        """Return microbatch and path of the running task, its action, and the planned order."""
        place = None if self.placement is None else self.placement.where()
        if place is not None:
            return place
        microbatch = None
        if self._ranks is not None:
            microbatch = self._ranks.step.microbatch
        return (microbatch, ()), None, None

    def step_begins(self, has_marks: bool) -> None:
        """Prepare for a new step.

        Args:
            has_marks: whether any module is checkpointed.
        """
        if self.offloader is not None:
            self._check_requests(self.offloader)
            self._check_horizon(self.offloader)
            self.offloader.begin_step()
            placement = self.placement
            is_used = has_marks or self.regions or (placement is not None and placement.groups)
            if self._steps == 1 and not is_used:
                logger.warning(
                    "offload_activations is true, but no module is checkpointed, so no activation leaves the device; call "
                    "smp.set_activation_checkpointing on the layers, or set offload_activations to false"
                )
        self._steps += 1

    def _check_requests(self, offloader: Offloader) -> None:
        """Warn once if the last step kept all regions' inputs on the device in spite of the offloader."""
        counts = offloader.tape.requests()
        if self._has_told or self._ranks is None or len(counts) < 2 or max(counts) > 1:
            return
        self._has_told = True
        if self._ranks.rank_in(Group.DP) == 0:
            logger.warning(
                "offload_activations saves nothing on pipeline stage %d: in each microbatch other stages call %d checkpointed "
                "regions there one by one, and the pipeline keeps on the device what stages hand to each other until the "
                "microbatch ends; let them call one module of this stage that holds these layers and is no region itself "
                "(smp.set_partition keeps it together), or set offload_activations to false",
                *(self._ranks.rank_in(Group.PP), len(counts)),
            )

    def _check_horizon(self, offloader: Offloader) -> None:
        """Warn once if nothing has left the device because the horizon covers the whole step."""
        # The second step is the first that follows the order of another.
        if self._steps != 2 or self._has_told or self._ranks is None:
            return
        if offloader.has_moved or not offloader.has_kept:
            return
        self._has_told = True
        if self._ranks.rank_in(Group.DP) == 0:
            logger.warning(
                "offload_activations moves nothing on pipeline stage %d: a step has %d forward and backward passes of checkpointed "
                "regions there, and activation_loading_horizon is %d, so that each input is used before it would have to leave; "
                "set activation_loading_horizon to a smaller number, or offload_activations to false",
                *(self._ranks.rank_in(Group.PP), len(offloader.tape.entries)),
                self._ranks.cfg.activation_loading_horizon,
            )


_plain = Activations(None)
