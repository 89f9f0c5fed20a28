"""What a rank knows of its regions: where they wait, and how they lie on the stages of a pipeline."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from smp_runtime.activations.offloading import Offloader
from smp_runtime.job import session as sessions
from smp_runtime.job.session import Session
from smp_runtime.model.staged_regions import Placement
from smp_runtime.pipeline.execution.rank_pipeline import Pipeline

logger = logging.getLogger("smp")

_of_sessions: weakref.WeakKeyDictionary[Session, Activations] = weakref.WeakKeyDictionary()


class Activations:
    """The checkpointed activations of one rank.

    Args:
        session: of the job; None before ``smp.init``, when regions are plain.

    Attributes:
        offloader: brings kept activations to CPU memory and back; None without ``offload_activations``.
        placement: of the regions on a pipeline's stages; None without pipeline parallelism.
        device: where this rank computes.
        regions: how many have run.
    """

    def __init__(self, session: Session | None) -> None:
        self.device = torch.device("cpu") if session is None else session.device
        # The pipeline holds it, and through its model the session, which must not keep itself alive here.
        self._placement: weakref.ref[Placement] | None = None
        self.offloader: Offloader | None = None
        self.is_manual = session is not None and not session.cfg.auto_partition
        self.regions = 0
        self._session = None if session is None else weakref.ref(session)
        self._has_warned = False
        self._steps = 0
        if session is not None and session.cfg.offload_activations:
            self.offloader = Offloader(session.cfg.activation_loading_horizon, session.device, self._where)

    @classmethod
    def here(cls) -> Activations:
        """Those of the running session; plain ones before ``smp.init``."""
        if not sessions.is_initialized():
            return _plain
        session = sessions.current()
        found = _of_sessions.get(session)
        if found is None:
            found = _of_sessions[session] = cls(session)
        return found

    @property
    def placement(self) -> Placement | None:
        """See the attributes."""
        return None if self._placement is None else self._placement()

    def device_of(self, leaves: Iterable[Any]) -> torch.device:
        """Whose random numbers a region uses: this rank's device, or before ``smp.init`` that of the arguments."""
        if self._session is None:
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
                    self.device = leaf.device
        return self.device

    def remote_calls(self) -> int:
        """How many modules of other stages the running task has called."""
        placement = self.placement
        return 0 if placement is None else placement.remote_calls()

    def _where(self) -> tuple[Any, Any, Any]:
        """Microbatch and path of the running task, its action, and the planned order."""
        placement = self.placement
        if placement is not None and (place := placement.where()) is not None:
            return place
        session = None if self._session is None else self._session()
        return (None if session is None else session.microbatch, ()), None, None

    def begin_step(self, module: nn.Module, pipeline: Pipeline | None) -> None:
        """A step of a model begins; every rank of a pipeline calls it.

        Raises:
            SMPUserError: a checkpointed module is split over stages that were set by hand.
        """
        from smp_runtime.activations import marking, taking_over

        placement = self.placement
        if pipeline is not None and (placement is None or placement.pipeline is not pipeline):
            placement = Placement(pipeline, is_manual=self.is_manual)
            self._placement = weakref.ref(placement)
        if pipeline is not None or self.offloader is not None:
            taking_over.take_over(module)
        if placement is not None:
            placement.check(module)
        if self.offloader is not None:
            self.offloader.begin_step()
            self._warn_if_useless(marking.has_marks(module))
        self._steps += 1

    def _warn_if_useless(self, has_marks: bool) -> None:
        placement = self.placement
        used = has_marks or self.regions or (placement is not None and placement.groups)
        if self._steps == 1 and not used and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "offload_activations is true, but no module is checkpointed, so no activation leaves the device; call "
                "smp.set_activation_checkpointing on the layers, or set offload_activations to false"
            )


_plain = Activations(None)
