"""Changes to Transformers' ``Trainer`` for this library, made in its classes after a script has loaded them.

Transformers has the calls for this library, but some of the steps on the way to them are missing, and which ones depends on
the release. ``docs/how-it-works/trainer.md`` lists them, with the changes that Transformers would need. Outside a job with model
parallelism, all of it does the same as Transformers.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from smp_config import Group
from smp_integrations import trainer_checkpoints as checkpoints
from smp_integrations.accelerate_state import describe_processes
from smp_integrations.trainer_steps import accepts_argument, prediction_step, training_step, whole_batch
from smp_runtime.job import session as sessions
from smp_runtime.module_conversion.scopes import is_marked, set_tensor_parallelism
from smp_runtime.optim.distributed_optimizer import DistributedOptimizer
from smp_runtime.optim.loss_scaling import make_loss_scaler
from smp_runtime.wrapped_model import DistributedModel

if TYPE_CHECKING:
    import torch

#: Of PyTorch's GradScaler.
_LOSS_SCALE = {"init_scale": 65536.0, "scale_factor": 2.0, "scale_window": 2000}
#: In the sentence with which releases refuse bf16 in jobs of this library.
_REFUSES_BF16 = "does not support BF16"


def adapt_arguments(module: ModuleType) -> None:
    """Adapt ``TrainingArguments``: use the device of this library, on machines without a GPU too."""
    for name in ("TrainingArguments", "SageMakerTrainingArguments"):
        kind = vars(module).get(name)
        if kind is None:
            continue
        own = vars(kind)
        if "_setup_devices" not in own:
            continue
        _property_of(kind, "_setup_devices", _device, module)
        if "__post_init__" in own:
            replace_method(kind, "__post_init__", _begin_arguments, module)


def adapt_trainer(module: ModuleType) -> None:
    """Adapt ``Trainer``: data per rank, the wrapped model and its optimizer, its own loss, all random number generators."""
    kind = module.Trainer
    methods: dict[str, Callable[..., Any]] = {
        "__init__": _begin_trainer,
        "create_accelerator_and_postprocess": _create_accelerator,
        "_wrap_model": _wrap_model,
        "create_optimizer": _create_optimizer,
        "training_step": _training_step,
        "prediction_step": _prediction_step,
        "_save_optimizer_and_scheduler": checkpoints.save_optimizer_and_scheduler,
        "_load_from_checkpoint": checkpoints.load_from_checkpoint,
        "save_model": checkpoints.save_model,
        "train": checkpoints.train,
        "_load_optimizer_and_scheduler": checkpoints.load_optimizer_and_scheduler,
        "_save_rng_state": checkpoints.save_rng_state,
        "_load_rng_state": checkpoints.load_rng_state,
    }
    for name, method in methods.items():
        if name in vars(kind):
            replace_method(kind, name, method, module)


def adapt_seq2seq(module: ModuleType) -> None:
    """Adapt ``Seq2SeqTrainer``: it generates with the wrapped model, and calls it as a step would."""
    replace_method(module.Seq2SeqTrainer, "prediction_step", _generation_step, sys.modules["transformers.trainer"])


def is_job(module: ModuleType) -> bool:
    """Return whether Transformers treats this process as a rank of this library."""
    names = vars(module)
    ask = names.get("is_sagemaker_mp_enabled") or names["is_sagemaker_model_parallel_available"]
    return bool(ask()) and sessions.is_initialized()


def replace_method(kind: type, name: str, method: Callable[..., Any], module: ModuleType) -> None:
    """Let ``method(former, self, …)`` answer for ``self.name(…)`` in jobs of this library."""
    former = getattr(kind, name)

    @functools.wraps(former)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_job(module):
            return former(self, *args, **kwargs)
        return method(functools.partial(former, self), self, *args, **kwargs)

    setattr(kind, name, call)


def _property_of(kind: type, name: str, method: Callable[..., Any], module: ModuleType) -> None:
    former = vars(kind)[name]

    def value(self: Any) -> Any:
        return method(self) if is_job(module) else former.__get__(self, type(self))

    replaced = functools.cached_property(value)
    replaced.__set_name__(kind, name)
    setattr(kind, name, replaced)


# -- TrainingArguments -------------------------------------------------------------------------------------------------


def _begin_arguments(former: Callable[..., Any], arguments: Any) -> None:
    if sessions.current_session().ranks.device.type == "cpu":
        arguments.use_cpu = True
    former()


def _device(arguments: Any) -> torch.device:
    """Set up the device as ``_setup_devices`` does for this library, on any device, and return it."""
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    describe_processes(sessions.current_session())  # what libraries ask that do not know of this one
    arguments.distributed_state = PartialState()
    device = sessions.current_session().ranks.device
    arguments._n_gpu = int(device.type != "cpu")
    return device


# -- Trainer -----------------------------------------------------------------------------------------------------------


def _begin_trainer(former: functools.partial[None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Use the precision of the job, as Transformers already does for fp16."""
    # Not bound to the signature, which lacks names that Transformers still takes, such as ``tokenizer``.
    given = dict(zip(inspect.signature(former).parameters, args, strict=False)).get("args", kwargs.get("args"))
    if given is None or not hasattr(given, "bf16"):
        former(*args, **kwargs)
        checkpoints.stop_and_resume(trainer)
        return
    wanted = sessions.current_session().ranks.cfg.bf16
    if given.bf16 != wanted:
        sessions.say_once(
            f"the job trains with bf16={wanted}, as its parameters for the model parallel library say, and not with the "
            f"bf16={given.bf16} of its TrainingArguments; set both alike"
        )
    refuses = _REFUSES_BF16 in inspect.getsource(sys.modules[inspect.unwrap(former.func).__module__])
    given.bf16 = wanted and not refuses
    try:
        former(*args, **kwargs)
    finally:
        given.bf16 = wanted
    checkpoints.stop_and_resume(trainer)


def _create_accelerator(former: functools.partial[None], trainer: Any) -> None:
    from smp_integrations.trainer_accelerator import TrainerAccelerator

    names = inspect.unwrap(former.func).__globals__
    plain = names["Accelerator"]
    names["Accelerator"] = functools.partial(TrainerAccelerator, trainer)
    try:
        former()
    finally:
        names["Accelerator"] = plain


def _wrap_model(_: Callable[..., Any], trainer: Any, model: Any, *args: Any, **kwargs: Any) -> DistributedModel:
    """Return one wrapped model for training, evaluation and prediction."""
    for known in (trainer.model_wrapped, model):
        if isinstance(known, DistributedModel):
            return known
    if sessions.current_session().ranks.size(Group.TP) > 1 and not is_marked(model):
        set_tensor_parallelism(model)
    # Trainer marks accumulating passes with no_sync: the last update of an epoch may have fewer passes than the others.
    trainer.model_wrapped = DistributedModel(model)
    return trainer.model_wrapped


def _create_optimizer(former: Callable[..., Any], trainer: Any, model: Any = None) -> DistributedOptimizer:
    """Create the optimizer of the wrapped model's parameters once, and return it."""
    if isinstance(trainer.optimizer, DistributedOptimizer):
        return trainer.optimizer
    wrapped = trainer.model_wrapped
    inner = wrapped.module if isinstance(wrapped, DistributedModel) else trainer.model
    if accepts_argument(former, "model"):
        is_default = model is None or isinstance(model, DistributedModel)
        made = former(inner if is_default else model)
    else:
        trainer.model_wrapped = inner  # the release takes that, and names of parameters as they are in the model
        try:
            made = former()
        finally:
            trainer.model_wrapped = wrapped
    _scale_losses(made)
    return made


def _scale_losses(optimizer: DistributedOptimizer) -> None:
    """Set the loss scale of a single process in fp16: Transformers makes the optimizer without one."""
    if sessions.current_session().ranks.cfg.fp16:
        optimizer.loss_scale_args = dict(_LOSS_SCALE)
        optimizer.dynamic_loss_scale = True
        optimizer.loss_scaler = make_loss_scaler(None, True, _LOSS_SCALE)


def _training_step(
    _: Callable[..., Any], trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any = None
) -> torch.Tensor:
    return training_step(trainer, model, inputs, num_items_in_batch)


def _prediction_step(
    _: Callable[..., Any], trainer: Any, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
) -> tuple[Any, Any, Any]:
    return prediction_step(trainer, model, inputs, prediction_loss_only, ignore_keys)


def _generation_step(
    former: Callable[..., Any],
    trainer: Any,
    model: DistributedModel,
    inputs: Any,
    prediction_loss_only: bool,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, Any, Any]:
    if not trainer.args.predict_with_generate or prediction_loss_only:
        return former(model, inputs, prediction_loss_only, *args, **kwargs)
    kept, trainer.model = trainer.model, model.module  # under tensor parallelism the former has other weights
    try:
        return former(whole_batch(trainer, model), inputs, prediction_loss_only, *args, **kwargs)
    finally:
        trainer.model = kept
