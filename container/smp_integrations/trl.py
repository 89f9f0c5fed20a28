"""Additions for TRL's trainers beyond Transformers' ``Trainer``: a reference model, pairs in one batch, metrics of a step.

Their own loss runs inside a step, on the stage that runs the step function, and records metrics on the trainer there.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from smp_config import Group
from smp_integrations.trainer import replace_method
from smp_integrations.trainer_steps import ShortBatch, prediction_step, samples_of
from smp_runtime.errors import SMPUserError
from smp_runtime.job import session as sessions
from smp_runtime.model.distributed_model import DistributedModel

if TYPE_CHECKING:
    from torch import nn

#: What TRL notes while a loss is computed, on the trainer: lists of numbers by mode and name, and how many tokens it has seen.
_METRICS, _TOKENS = "_metrics", "_total_train_tokens"
#: A label that does not count.
_IGNORED = -100
#: Knows whether this is a job of this library.
_TRAINER = "transformers.trainer"
#: Name of the reference model inside the trained model; the trained model's state leaves it out.
REFERENCE = "reference_model"


def adapt_sft(module: ModuleType) -> None:
    """Adapt ``SFTTrainer``."""
    module.SFTTrainer.smp_items = _scored_tokens
    for name, method in _METHODS.items():
        replace_method(module.SFTTrainer, name, method, sys.modules[_TRAINER])


def adapt_dpo(module: ModuleType) -> None:
    """Adapt ``DPOTrainer``."""
    for name, method in {**_METHODS, "_wrap_model": _wrap_with_reference}.items():
        replace_method(module.DPOTrainer, name, method, sys.modules[_TRAINER])
    module.DPOTrainer.smp_batch = _batch_of_pairs


# -- steps -------------------------------------------------------------------------------------------------------------


def _training_step(former: Callable[..., Any], trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    with _shared_metrics(trainer, model):
        return former(model, *args, **kwargs)


def _prediction_step(
    _: Callable[..., Any], trainer: Any, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
) -> tuple[Any, Any, Any]:
    """Run a prediction step, always with the trainer's own loss."""
    with _shared_metrics(trainer, model):
        loss, outputs, labels = prediction_step(
            trainer, model, inputs, prediction_loss_only, ignore_keys, has_loss=True
        )
    if not prediction_loss_only and labels is None:
        labels = inputs["input_ids"]
    return loss, outputs, labels


def _compute_loss(former: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute the loss, but discard metrics that the tracing step records: it is not a training step."""
    if not sessions.current_session().ranks.step.is_tracing:
        return former(*args, **kwargs)
    kept = {name: copy.deepcopy(getattr(trainer, name)) for name in (_METRICS, _TOKENS)}
    try:
        return former(*args, **kwargs)
    finally:
        vars(trainer).update(kept)


_METHODS: dict[str, Callable[..., Any]] = {
    "training_step": _training_step,
    "prediction_step": _prediction_step,
    "compute_loss": _compute_loss,
}


@contextmanager
def _shared_metrics(trainer: Any, model: DistributedModel) -> Iterator[None]:
    """Copy metrics that the step function records in the block from the stage that runs it to every stage."""
    yield
    pipeline = model.pipeline
    if pipeline is None:
        return
    ranks = sessions.current_session().ranks
    mine = {name: getattr(trainer, name) for name in (_METRICS, _TOKENS)} if pipeline.is_root else None
    every = ranks.control.allgather(mine, ranks.members(Group.PP))
    vars(trainer).update(next(found for found in every if found is not None))


def _scored_tokens(trainer: Any, inputs: Mapping[str, Any]) -> Any:
    """Return the number of tokens for TRL's mean over a batch in evaluation.

    Every label counts, except the first of a sequence.
    """
    labels = inputs.get("labels")
    if labels is None:
        return None
    count = (labels[:, 1:] != _IGNORED).sum()
    return trainer.accelerator.gather(count).sum() if trainer.args.average_tokens_across_devices else count


# -- preferences -------------------------------------------------------------------------------------------------------


def _batch_of_pairs(trainer: Any, inputs: Mapping[str, Any], by_samples: bool) -> ShortBatch:
    """Return a batch with whole pairs in each microbatch.

    The chosen halves of all pairs come first in the batch, then the rejected ones.
    """
    return ShortBatch(inputs, samples_of(inputs) // 2, by_samples, parts=2)


def _wrap_with_reference(former: Callable[..., Any], trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Distribute the reference model like the one that is trained: as a part of it that its state leaves out."""
    reference = trainer.ref_model
    ranks = sessions.current_session().ranks
    is_split = ranks.size(Group.PP) > 1 or ranks.size(Group.TP) > 1
    is_divided = is_split or ranks.cfg.sharded_data_parallel_degree > 1
    is_wrapped = isinstance(model, DistributedModel) or isinstance(trainer.model_wrapped, DistributedModel)
    if reference is None or not is_divided or is_wrapped or trainer.precompute_ref_logps:
        return former(model, *args, **kwargs)
    if getattr(trainer.args, "sync_ref_model", False):
        raise SMPUserError(
            "sync_ref_model is true, but each rank has only parts of the model and of its reference, which do not lie alike; "
            "set sync_ref_model to false, or train with data parallelism only",
            code="SMP312",
        )
    add_reference(model, reference)
    return former(model, *args, **kwargs)


def add_reference(model: nn.Module, reference: nn.Module) -> None:
    """Add a frozen model in evaluation mode to another model, without a change to that model's state or names."""
    reference.requires_grad_(False).eval()
    # It evaluates whatever the model around it does.
    reference.__dict__["train"] = lambda mode=True: reference
    model.add_module(REFERENCE, reference)
    model.register_state_dict_post_hook(_leave_out)
    model.register_load_state_dict_post_hook(_do_not_miss)


def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}{REFERENCE}.")]:
        del state[name]


def _do_not_miss(module: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [name for name in keys.missing_keys if f"{REFERENCE}." not in name]
