"""What a rank copies after each step: worked out once, and again when anything but values has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from smp_runtime.checkpoint.saving.save_plan import SavePlan, WriteShare, contents_of
from smp_runtime.microbatch_state.remote_stubs import RemoteStub
from smp_runtime.parameters.pending_gather import PendingParameter, wait_for
from smp_runtime.tensors.torch_private import DisableTorchFunctionSubclass

if TYPE_CHECKING:
    from smp_runtime.job.session import Session
    from smp_runtime.model.distributed_model import DistributedModel
    from smp_runtime.optim.distributed_optimizer import DistributedOptimizer

#: Of the wrapped model, which its own contents hold: kept elsewhere, they would keep it alive when the script drops it.
_ATTRIBUTE = "_smp_known_contents"


class KnownContents:
    """The contents of one model and optimizer, with all by which one sees that they are still those.

    Args:
        optimizer: None for none.
    """

    def __init__(
        self, session: Session, model: DistributedModel, optimizer: DistributedOptimizer | None, share: WriteShare
    ) -> None:
        self._optimizer = optimizer
        self._objects, self._places = _marks(model, optimizer)
        self.contents = contents_of(session, model, optimizer, share, as_held=True)

    @classmethod
    def of(
        cls, session: Session, model: DistributedModel, optimizer: DistributedOptimizer | None, share: WriteShare
    ) -> SavePlan:
        """Return the plan of what this rank copies now; see :func:`contents_of`.

        It has live tensors, and settings as they are when it is built.
        """
        model.adopt_writes()  # into the shards, which are copied, and which nothing else looks at before the next step
        known: KnownContents | None = vars(model).get(_ATTRIBUTE)
        if known is None or not known.still_holds(model, optimizer):
            known = cls(session, model, optimizer, share)
            vars(model)[_ATTRIBUTE] = known
        return known.contents

    @staticmethod
    def forget(model: DistributedModel) -> None:
        """Drop the cached contents of a model before its layout changes, so that they do not stay in memory."""
        vars(model).pop(_ATTRIBUTE, None)

    def still_holds(self, model: DistributedModel, optimizer: DistributedOptimizer | None) -> bool:
        """Return whether only values have changed."""
        if optimizer is not self._optimizer:
            return False
        objects, places = _marks(model, optimizer)
        is_alike = places == self._places and len(objects) == len(self._objects)
        if not is_alike:
            return False
        # By identity: comparing tensors would read their values, and an equal copy is not what the plan refers to.
        return all(one is other for one, other in zip(objects, self._objects, strict=True))


def _marks(model: DistributedModel, optimizer: DistributedOptimizer | None) -> tuple[list[object], list[object]]:
    """Return objects that must be identical, and values that must be equal, for the contents to remain valid.

    The values are, among others, names and the addresses of tensors.
    """
    objects: list[object] = []
    places: list[object] = []
    for module in model.module.modules():
        objects.append(module)
        places += [*module._parameters, *module._buffers]
        objects += [*module._parameters.values(), *module._buffers.values()]
    if optimizer is not None:
        for group in optimizer.original_groups():
            objects += group
            places.append(len(group))
        for parameter, state in optimizer.state.items():
            objects += [parameter, *state.values()]
            places += state
    for shard in (model.optimizer_shards or {}).values():
        objects += [None, None] if shard is None else [shard.optimized, shard.stored]
    if model.shards is not None:
        objects += [getattr(parameter, "ds_tensor", None) for parameter in model.shards.places]
    places += _tensor_places(objects)
    return objects, places


def _tensor_places(objects: list[object]) -> list[object]:
    # Of parameters of other stages nothing is copied, and to ask them takes long.
    tensors = [each for each in objects if isinstance(each, torch.Tensor) and not isinstance(each, RemoteStub)]
    for tensor in tensors:
        if isinstance(tensor, PendingParameter):
            wait_for(tensor)  # its elements are copied next, by a tensor that does not wait
    # A sharded parameter, asked itself, would fill its unit's whole memory, and warn that a script reads it.
    with DisableTorchFunctionSubclass():
        return [mark for each in tensors for mark in (each.data_ptr(), each.shape, each.requires_grad)]
