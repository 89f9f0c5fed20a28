"""The strategy of Lightning's ``Trainer``: it runs the steps of a ``LightningModule`` that the job divides."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from smp_config import Group
from smp_config.errors import kind_of
from smp_integrations.lightning_job import JobEnvironment, JobStrategy, whole_parameters
from smp_integrations.shared_order import share_order
from smp_runtime.errors import SMPUserError
from smp_runtime.model.distributed_model import DistributedModel
from smp_runtime.optim.distributed_optimizer import DistributedOptimizer
from smp_runtime.optim.grad_scaler import GradScaler
from smp_runtime.step.microbatches import StepOutput
from smp_runtime.step.step import step as smp_step

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

#: Under which the wrapped model has the script's.
_PREFIX = "lightning_module."


class SMPStrategy(JobStrategy, ParallelStrategy):
    """``Trainer(strategy=SMPStrategy())``: the ``LightningModule`` is trained as the job divides it.

    With pipeline parallelism, or several microbatches, a step of the module runs once for each microbatch, its backward pass
    at once after it; what it logs is averaged over them. Optimization is automatic then.

    Args:
        config: for ``smp.init``, where the job carries none.
        loss_scale: arguments of ``smp.DistributedOptimizer`` for fp16; by default the scale begins with 2¹⁶ and adapts.
        options: arguments of ``smp.DistributedModel``, such as ``bucket_cap_mb``.
    """

    model: Any
    optimizers: Any

    def __init__(
        self, config: Mapping[str, Any] | None = None, loss_scale: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        JobStrategy.__init__(self, config, loss_scale, options)
        ParallelStrategy.__init__(self, cluster_environment=JobEnvironment())
        cfg = self._job.ranks.cfg
        self._in_microbatches = self._job.ranks.size(Group.PP) > 1 or cfg.microbatches > 1
        self._steps: dict[str, Callable[..., Any]] = {}
        self._logged: dict[int | None, dict[str, tuple[torch.Tensor, str]]] = {}
        self._has_gradients = False
        self._updated = False

    @property
    def is_distributed(self) -> bool:
        """Return whether data loaders get a distributed sampler: batches differ between ranks."""
        return self._job.ranks.size(self._batches) > 1

    def process_dataloader(self, dataloader: object) -> object:
        """Give stages of one pipeline the same batches."""
        share_order(dataloader, self._job.ranks)
        return dataloader

    # -- start -----------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Set up the environment; no process is started, because the ranks are already connected."""
        super().setup_environment()
        rank_zero_only.rank = self._job.ranks.rank

    def model_to_device(self) -> None:
        """Move the module; the parts of a wrapped one lie where they belong."""
        if self.lightning_module is not None:
            self.lightning_module.to(self.root_device)

    def setup(self, trainer: Trainer) -> None:
        """Wrap the module and the optimizers that ``configure_optimizers`` returns."""
        module, plugin = self.lightning_module, self.precision_plugin
        if self.accelerator is None or module is None:
            raise AssertionError("Lightning connects the accelerator and the module before this")
        self.accelerator.setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self._in_microbatches and not module.automatic_optimization:
            raise SMPUserError(
                f"{type(module).__name__} optimizes by itself (automatic_optimization=False), but with pipeline parallelism or "
                f"microbatches the strategy runs backward for each of {self._job.ranks.cfg.microbatches} microbatches; leave it "
                "True, or write the loop with smp.step",
                code="SMP312",
            )
        if getattr(plugin, "scaler", None) is not None:
            plugin.scaler = GradScaler()
        self.model = self._wrapped(plugin.convert_module(module))
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        plugin.main_params = whole_parameters

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Wrap the module's optimizers."""
        super().setup_optimizers(trainer)
        self.optimizers = [_Optimizer(optimizer, self, self._loss_scale) for optimizer in self.optimizers]

    def _wrapped(self, module: LightningModule) -> nn.Module:
        known = (model for model in self._job.models if getattr(model.module, "lightning_module", None) is module)
        found: Any = next(known, None)  # of an earlier fit
        if found is None:
            self.model_to_device()
            return self.wrapped_model(_Steps(module))
        return found

    # -- steps -----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step, and in microbatches its backward passes."""
        return self._run("training_step", self.precision_plugin.train_step_context, args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step."""
        return self._run("validation_step", self.precision_plugin.val_step_context, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step."""
        return self._run("test_step", self.precision_plugin.test_step_context, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step."""
        return self._run("predict_step", self.precision_plugin.predict_step_context, args, kwargs)

    def _run(self, name: str, context: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._in_microbatches:
            with context():
                return self.model(name, *args, **kwargs)
        if name not in self._steps:
            self._steps[name] = smp_step(self._microbatch_of(name, context))
        if name == "training_step":
            if self._updated:
                self._clear_gradients()
            self._has_gradients = True
        with self._logging():
            output, logged, how = self._steps[name](*args, **kwargs)
        module = self.lightning_module
        for key, value in logged.items():
            module.log(key, value.reduce_mean(), **json.loads(how[key][0]))
        merged = _merged(output)
        self._has_gradients &= merged is not None  # without a loss no backward pass has run
        return merged

    def _microbatch_of(self, name: str, context: Callable[[], Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            microbatch = self._job.ranks.step.microbatch
            self._logged[microbatch] = {}
            with context():
                output = self.model(name, *args, **kwargs)
            logged = self._logged.pop(microbatch)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if name == "training_step" and loss is not None:
                module, plugin = self.lightning_module, self.precision_plugin
                scaler = getattr(plugin, "scaler", None)
                loss = loss / module.trainer.accumulate_grad_batches
                self.model.backward(loss if scaler is None else scaler.scale(loss))
            return (
                output,
                {key: value for key, (value, _) in logged.items()},
                {k: how for k, (_, how) in logged.items()},
            )

        return run

    @contextlib.contextmanager
    def _logging(self) -> Iterator[None]:
        """Note what a microbatch logs: it runs on one rank of a pipeline, and all ranks are to know."""
        module = self.lightning_module

        def log(name: str, value: Any, *args: Any, **how: Any) -> None:
            if not isinstance(value, torch.Tensor | int | float):
                raise SMPUserError(
                    f"self.log({name!r}, …) got {kind_of(value)}, but with pipeline parallelism or microbatches numbers "
                    "and tensors are averaged over the microbatches; log metric.compute() after the epoch",
                    code="SMP312",
                )
            how.update(zip(("prog_bar", "logger", "on_step", "on_epoch"), args, strict=False))
            text = json.dumps(
                {key: setting for key, setting in how.items() if isinstance(setting, str | bool | int | None)}
            )
            value = torch.as_tensor(value, dtype=torch.float32, device=self.root_device).detach()
            self._logged[self._job.ranks.step.microbatch][name] = value, text

        module.__dict__["log"] = log
        try:
            yield
        finally:
            del module.__dict__["log"]

    def _clear_gradients(self) -> None:
        """Clear gradients before the first microbatch, because Lightning clears them between forward and backward."""
        self._has_gradients = self._updated = False
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run backward of a loss; in microbatches it has already run."""
        if not self._in_microbatches:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        self._has_gradients = False
        from lightning.pytorch.plugins.precision import Precision

        Precision.pre_backward(self.precision_plugin, closure_loss, self.lightning_module)
        Precision.post_backward(self.precision_plugin, closure_loss, self.lightning_module)
        return closure_loss

    def keeps_gradients(self) -> bool:
        """Return whether there are new gradients that the loop is about to clear as if they were old."""
        return self._has_gradients

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Update the module."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._updated = self._in_microbatches
        return result

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients of the passes in the block, and average them after a later pass."""
        with self.model.no_sync() if isinstance(self.model, DistributedModel) else contextlib.nullcontext():
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or sum over the data parallel ranks."""
        return self.all_reduce(tensor, group, reduce_op)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Return True: the wrapped model loads its own parts after setup."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole state on the first rank only, with the names of a single process."""
        return {key.removeprefix(_PREFIX): value for key, value in self.state_of(self.model).items()}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the whole state."""
        state = checkpoint["state_dict"]
        self.model.load_state_dict({f"{_PREFIX}{key}": value for key, value in state.items()}, strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the whole state of an optimizer on the first rank only."""
        return self.optimizer_state_of(getattr(optimizer, "_optimizer", optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the whole state of every optimizer."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """Release the plugins, but keep the model on its device: its parts are of no use on another device."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()


class _Steps(nn.Module):
    """Calls a step of the module by its name, as ``forward``."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.lightning_module = module

    def forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.lightning_module, name)(*args, **kwargs)


class _Optimizer(DistributedOptimizer):
    """Runs the closure first, in which a pipeline's first step takes place, and keeps gradients that are not old."""

    def __init__(self, optimizer: torch.optim.Optimizer, strategy: SMPStrategy, loss_scale: Mapping[str, Any]) -> None:
        super().__init__(optimizer, **loss_scale)
        self._keeps = strategy.keeps_gradients

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        super().step()
        return result

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if not self._keeps():
            super().zero_grad(set_to_none)


def _merged(value: Any) -> Any:
    """Return the output of a whole batch, merged from the microbatches.

    Values other than tensors stay a list with one value for each microbatch, unless all are equal.
    """
    if isinstance(value, StepOutput):
        is_number = value.outputs[0].ndim == 0
        return value.reduce_mean() if is_number else value.concat()
    if isinstance(value, Mapping):
        return {key: _merged(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_merged, value))
    if isinstance(value, list) and value:
        return _merged_list(value)
    return value


def _merged_list(values: list[Any]) -> Any:
    for one in values:
        if isinstance(one, StepOutput | Mapping | tuple):
            return list(map(_merged, values))
    # A value for the whole batch, such as a name, is the same from each microbatch.
    for one in values:
        if one != values[0]:
            return values
    return values[0]
