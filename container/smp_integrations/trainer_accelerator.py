"""The ``Accelerator`` of a ``Trainer``: data and results as for any script, while the trainer wraps the model itself."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from smp_integrations.accelerator import JobAccelerator
from smp_runtime.job import session as sessions
from smp_runtime.model.distributed_model import DistributedModel
from smp_runtime.optim.distributed_optimizer import DistributedOptimizer

if TYPE_CHECKING:
    import torch


class TrainerAccelerator(JobAccelerator):
    """Divides data and gathers results; neither casts nor divides losses, which trainer and job do.

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
        # The trainer holds this object: a reference back would keep both until a garbage collection.
        self._trainer = weakref.ref(trainer)

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Prepare objects as Accelerate does, but first create the trainer's optimizer for the wrapped model if it is missing."""
        trainer = self._trainer()
        if trainer is None or len(objects) != 1:
            return super().prepare(*objects, **options)
        if objects[0] is not trainer.optimizer:
            return super().prepare(*objects, **options)
        if not isinstance(trainer.optimizer, DistributedOptimizer):
            trainer.create_optimizer()
        # A subclass may have created another one.
        if not isinstance(trainer.optimizer, DistributedOptimizer):
            trainer.optimizer = DistributedOptimizer(trainer.optimizer)
        is_known = any(trainer.optimizer is known for known in self._optimizers)
        if not is_known:
            self._optimizers.append(trainer.optimizer)
        return trainer.optimizer

    def unwrap_model(self, model: Any, *args: Any, **options: Any) -> Any:
        """Return the script's own model."""
        trainer = self._trainer()
        if isinstance(model, DistributedModel) and trainer is not None and trainer.model_wrapped is model:
            return trainer.model
        return super().unwrap_model(model, *args, **options)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Run backward of a loss that the trainer has divided by the number of accumulation steps."""
        trainer = self._trainer()
        if trainer is not None and isinstance(trainer.model_wrapped, DistributedModel):
            trainer.model_wrapped.backward(loss, **options)
        else:
            super().backward(loss, **options)
