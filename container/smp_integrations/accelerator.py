"""Accelerate's ``Accelerator`` in a job of several ranks: it wraps and divides prepared objects as the job requires."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DynamoBackend, recursively_apply
from torch import nn

from smp_config import Group
from smp_integrations.accelerate_state import describe_processes
from smp_integrations.accelerated_optimizer import AcceleratedDistributedOptimizer, loss_scale_of
from smp_integrations.shared_order import refuse_divided, share_order
from smp_runtime.checkpoint.save_and_resume import resume_from_checkpoint, save_checkpoint
from smp_runtime.data.position import batch_group
from smp_runtime.errors import SMPUserError
from smp_runtime.job import session as sessions
from smp_runtime.job.ranks import PARAMETERS_VARIABLE
from smp_runtime.optim.distributed_optimizer import DistributedOptimizer
from smp_runtime.optim.grad_scaler import GradScaler
from smp_runtime.wrapped_model import DistributedModel

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

#: Arguments and variables of Accelerate that ask for another way to divide a model.
_OTHER_WAYS = {
    "deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED",
    "deepspeed_plugins": "ACCELERATE_USE_DEEPSPEED",
    "fsdp_plugin": "ACCELERATE_USE_FSDP",
    "megatron_lm_plugin": "ACCELERATE_USE_MEGATRON_LM",
    "parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
    "torch_tp_plugin": "",
}
#: Libraries that make accelerators for themselves and do the rest themselves, too.
_OWN_WAYS = ("transformers", "trl", "smp_integrations")
#: The folder and the tag of what :meth:`JobAccelerator.save_state` saves beside Accelerate's own files.
_FOLDER, _TAG = "smp", "state"


class JobAccelerator(Accelerator):
    """``accelerate.Accelerator`` for models that the job divides; a script that calls the latter gets this.

    ``prepare`` wraps models in ``smp.DistributedModel`` and optimizers in ``smp.DistributedOptimizer`` where the script has
    not. ``num_processes`` counts the batches that differ. Arguments are Accelerate's.
    """

    _models: list[nn.Module]
    _optimizers: list[Any]
    _load_model_state_pre_hook: dict[str, Callable[..., None]]
    _save_model_state_pre_hook: dict[str, Callable[..., None]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._job = sessions.current_session()
        ranks = self._job.ranks
        _refuse_other_ways(kwargs)
        describe_processes(self._job)
        super().__init__(*args, **kwargs)
        if ranks.cfg.fp16 or ranks.cfg.bf16:
            half = "fp16" if ranks.cfg.fp16 else "bf16"
            if self.mixed_precision not in ("no", half):
                raise SMPUserError(
                    f'the job trains in {half}, but Accelerator(mixed_precision="{self.mixed_precision}") asks for another type; '
                    f'leave mixed_precision out, or "{half}": True in the parameters',
                    code="SMP312",
                )
            self.native_amp, self.scaler = False, None  # weights and activations are half precision already
        elif self.scaler is not None:
            given = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
            self.scaler = GradScaler(**given)
        elif self.mixed_precision == "fp16" and not self.native_amp:
            sessions.say_once(
                'Accelerator(mixed_precision="fp16") does nothing on CPU, where Accelerate trains in float32; set "fp16": True in '
                'the parameters of the job, or mixed_precision="bf16"'
            )
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise SMPUserError(
                "Accelerator was told to compile models, and would compile around smp.DistributedModel, which runs the passes of "
                "other ranks too; leave dynamo_backend out, and call model.module.compile() after prepare",
                code="SMP312",
            )

    # -- preparation -----------------------------------------------------------------------------------------------

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Wrap a model in ``smp.DistributedModel``; one that is never trained is only put on the device."""
        trains = not evaluation_mode and any(p.requires_grad for p in model.parameters())
        if trains and not isinstance(model, DistributedModel):
            given = self.ddp_handler.to_kwargs() if self.ddp_handler is not None else {}
            taken = (
                "bucket_cap_mb",
                "broadcast_buffers",
                "gradient_as_bucket_view",
                "find_unused_parameters",
            )
            model = DistributedModel(model, **{name: given[name] for name in taken if given.get(name) is not None})
            if self.ddp_handler is not None:
                _register_hook(self.ddp_handler, model)
        # evaluation_mode=True keeps Accelerate from adding its own wrapper.
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """Wrap an optimizer in ``smp.DistributedOptimizer``, and that so that it waits for accumulated gradients."""
        if isinstance(optimizer, AcceleratedDistributedOptimizer):
            if not any(optimizer is known for known in self._optimizers):
                self._optimizers.append(optimizer)
            return optimizer
        if not isinstance(optimizer, DistributedOptimizer):
            optimizer = DistributedOptimizer(optimizer, **loss_scale_of(self.scaler_handler, self._job.ranks.cfg.fp16))
        wrapped = AcceleratedDistributedOptimizer(optimizer, device_placement=False, scaler=self.scaler)
        self._optimizers.append(wrapped)
        return wrapped

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **kwargs: Any) -> Any:
        """Divide the samples between the ranks with different batches, in an order that all ranks share."""
        refuse_divided(data_loader)
        share_order(data_loader, self._job.ranks)
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    # -- training --------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward of a loss divided by the number of accumulation steps; with a pipeline, call it inside ``@smp.step``."""
        models = self._wrapped()
        if len(models) != 1 or self.scaler is not None:
            super().backward(loss, **kwargs)
            return
        models[0].backward(loss / self.gradient_accumulation_steps, kwargs.pop("gradient", None), **kwargs)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients of the passes in the block, and average them over the replicas after a later pass."""
        with model.no_sync() if isinstance(model, DistributedModel) else contextlib.nullcontext():
            yield

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Refuse models that are wrapped.

        Raises:
            SMPUserError: the model is wrapped.
        """
        if isinstance(model, DistributedModel):
            raise SMPUserError(
                "accelerator.trigger_sync_in_backward got a model of smp.DistributedModel, whose passes under no_sync were begun "
                "without reduction; leave the last forward pass outside accelerator.no_sync instead",
                code="SMP312",
            )
        yield

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Iterable[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Let the ranks run different numbers of batches, as ``model.join()`` does."""
        even = self.even_batches if even_batches is None else even_batches
        samplers = [
            loader.batch_sampler for loader in self._dataloaders if hasattr(loader.batch_sampler, "even_batches")
        ]
        before = [sampler.even_batches for sampler in samplers]
        with contextlib.ExitStack() as stack:
            for joinable in joinables:
                if isinstance(joinable, DistributedModel):
                    stack.enter_context(joinable.join(enable=not even))
            for sampler in samplers:
                sampler.even_batches = even
            try:
                yield
            finally:
                for sampler, former in zip(samplers, before, strict=True):
                    sampler.even_batches = former

    # -- collectives over ranks with different batches -------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Return the values of all processes, concatenated along the first dimension."""
        group, count = self._process_group(), self.num_processes

        def gathered(one: torch.Tensor) -> torch.Tensor:
            one = (one.detach()[None] if one.ndim == 0 else one.detach()).contiguous()
            if count == 1:
                return one
            if self._job.ranks.step.is_tracing:  # which this rank does alone
                return torch.cat([one] * count)
            found = [torch.empty_like(one) for _ in range(count)]
            dist.all_gather(found, one, group)
            return torch.cat(found)

        return recursively_apply(gathered, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the result of :meth:`gather` without the samples that fill up the last batch; objects become a list."""
        try:
            recursively_apply(lambda one: one, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if use_gather_object:
            everyone: list[Any] = [input_data] * self.num_processes
            if not self._job.ranks.step.is_tracing:
                dist.all_gather_object(everyone, input_data, self._process_group())
            data: Any = [one for some in everyone for one in some]
        else:
            data = self.gather(input_data)
        state = self.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return data
        if use_gather_object:
            return data[: state.remainder]
        return recursively_apply(lambda one: one[: state.remainder], data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or the mean over all processes; with ``"none"``, return the values unchanged."""

        def reduced(one: torch.Tensor) -> torch.Tensor:
            if reduction == "none":
                return one
            total = one.detach().clone()
            is_alone = self.num_processes == 1 or self._job.ranks.step.is_tracing
            if not is_alone:
                dist.all_reduce(total, group=self._process_group())
            total = total * scale
            return total / self.num_processes if reduction == "mean" else total

        return recursively_apply(reduced, tensor, error_on_other_type=True)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Make tensors as long as the longest one of all processes along a dimension."""

        def padded(one: torch.Tensor) -> torch.Tensor:
            if dim >= one.ndim or dim < -one.ndim:
                return one
            most = int(self.gather(torch.tensor(one.shape[dim], device=one.device)).max())
            missing = list(one.shape)
            missing[dim] = most - one.shape[dim]
            filling = one.new_full(missing, pad_index)
            return torch.cat([filling, one] if pad_first else [one, filling], dim)

        return recursively_apply(padded, tensor, error_on_other_type=True)

    def wait_for_everyone(self) -> None:
        """Wait for every rank of the job."""
        self._job.ranks.control.barrier(self._job.ranks.members(Group.WORLD))

    # -- saving ----------------------------------------------------------------------------------------------------

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the script's own model.

        This rank may have only a part of it: :meth:`get_state_dict` returns the whole state.
        """
        inner = model.module if isinstance(model, DistributedModel) else model
        return super().unwrap_model(inner, *args, **kwargs)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the whole state of a model; every rank must call this."""
        if isinstance(model, DistributedModel):
            return model.state_dict()
        return super().get_state_dict(model, unwrap=unwrap)

    def save_model(self, model: nn.Module, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save the whole weights; every rank calls it, the main process writes."""
        if isinstance(model, DistributedModel):
            model = _WholeModel(model.state_dict(gather_to_rank0=True))
        super().save_model(model, save_directory, *args, **kwargs)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Save what was prepared and registered; every rank calls it. The model and the optimizer go into ``smp/``.

        Raises:
            SMPUserError: several models were prepared, or a pipeline has not run its first step.
        """
        model, optimizer = self._one_of_each("save_state")
        with self._without(model):
            location = super().save_state(output_dir, *args, **kwargs)
        for hook in self._save_model_state_pre_hook.values():
            hook(self._models, [], str(location))
        save_checkpoint(self._job, str(Path(location) / _FOLDER), _TAG, model=model, optimizer=optimizer)
        return location

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load what :meth:`save_state` saved, with any number of ranks and before the first step, too."""
        model, optimizer = self._one_of_each("load_state")
        found: list[str] = []
        former = self._load_model_state_pre_hook
        self._load_model_state_pre_hook = {"where": lambda _, folder: found.append(str(folder))}
        try:
            with self._without(model):
                super().load_state(input_dir, *args, **kwargs)
        finally:
            self._load_model_state_pre_hook = former
        for hook in former.values():
            hook([], found[0])
        resume_from_checkpoint(self._job, str(Path(found[0]) / _FOLDER), _TAG, load_optimizer=optimizer is not None)

    # -- its parts -------------------------------------------------------------------------------------------------

    def _wrapped(self) -> list[DistributedModel]:
        return [model for model in self._models if isinstance(model, DistributedModel)]

    def _process_group(self) -> dist.ProcessGroup:
        return self._job.ranks.process_group(batch_group(self._job.ranks))

    def _one_of_each(self, what: str) -> tuple[DistributedModel, DistributedOptimizer | None]:
        models = self._wrapped()
        optimizers = [o.optimizer for o in self._optimizers if isinstance(o, AcceleratedDistributedOptimizer)]
        if len(models) != 1 or len(optimizers) > 1:
            raise SMPUserError(
                f"accelerator.{what} saves and loads one model with one optimizer, but {len(models)} trained models and "
                f"{len(optimizers)} optimizers were prepared; save each model by smp.save_checkpoint(model=…, optimizer=…)",
                code="SMP312",
            )
        return models[0], optimizers[0] if optimizers else None

    @contextlib.contextmanager
    def _without(self, model: DistributedModel) -> Iterator[None]:
        """Let Accelerate save and load everything but the model in the block, with a random state for each rank."""
        state, models, optimizers, hooks = self.state, self._models, self._optimizers, self._save_model_state_pre_hook
        index = state.process_index
        self._models = [other for other in models if other is not model]
        self._optimizers, self._save_model_state_pre_hook = [], {}
        state.process_index = self._job.ranks.rank
        try:
            yield
        finally:
            state.process_index = index
            self._models, self._optimizers, self._save_model_state_pre_hook = models, optimizers, hooks


class _WholeModel(nn.Module):
    """A stand-in for a model, with a given whole state."""

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self._state = state

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return self._state


def _register_hook(handler: DistributedDataParallelKwargs, model: DistributedModel) -> None:
    """Register the communication hook that the handler names, with the arguments of DDP's method."""

    class HookTarget:
        @staticmethod
        def register_comm_hook(state: Any, hook: Callable[..., Any]) -> None:
            model.register_comm_hook(state, hook)

    handler.register_comm_hook(HookTarget)


def _refuse_other_ways(given: dict[str, Any]) -> None:
    for name, variable in _OTHER_WAYS.items():
        from_environment = os.environ.get(variable, "false").lower() == "true"
        if given.get(name) is not None or from_environment:
            asked = f"Accelerator({name}=…)" if not from_environment else f"{variable}=true"
            raise SMPUserError(
                f"{asked} asks Accelerate to divide the model, but this job divides it by its own parameters; leave it out, and "
                "set tensor_parallel_degree, pipeline_parallel_degree or sharded_data_parallel_degree",
                code="SMP312",
            )


def give_to_scripts(module: ModuleType) -> None:
    """Make ``accelerate.Accelerator`` create a :class:`JobAccelerator` in scripts, from now on, in a job of several ranks."""

    def new(cls: type, *_: Any, **__: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        is_script_s = caller.partition(".")[0] not in _OWN_WAYS
        if cls is Accelerator and is_script_s and _has_several_ranks():
            cls = JobAccelerator
        return object.__new__(cls)

    Accelerator.__new__ = new


def _has_several_ranks() -> bool:
    """Return whether this process is one of several ranks; in a job it joins them."""
    if PARAMETERS_VARIABLE in os.environ:  # the script may have left it to its first use
        sessions.init()
    return sessions.is_initialized() and sessions.current_session().ranks.size(Group.WORLD) > 1
