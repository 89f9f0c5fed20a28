"""A wrapped model's outside: the attributes, names and iterators of the module inside, and its device."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config import Group
from smp_runtime.errors import SMPAttributeError, SMPUserError
from smp_runtime.model.options import register_hook
from smp_runtime.model.whole_copy import plain_copy, whole_copy
from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.tensor_parallel.group import TensorGroup
from smp_runtime.tensors.torch_private import device_asked_for, dtype_asked_for

if TYPE_CHECKING:
    from collections import OrderedDict

    from torch.utils.hooks import RemovableHandle

    from smp_runtime.job.ranks import Ranks
    from smp_runtime.job.session import Session
    from smp_runtime.model.gradient_accumulation import GradientAccumulation
    from smp_runtime.model.local_part import LocalPart, ParallelState
    from smp_runtime.model.stages import Stages
    from smp_runtime.model.state_dict import ModelState
    from smp_runtime.parameters.precision import Precision
    from smp_runtime.parameters.registry import ParameterRegistry


class WrappedModule(nn.Module):
    """A wrapper through which scripts see the module inside.

    Attributes:
        module: the user's module.
    """

    module: nn.Module
    precision: Precision
    _part: LocalPart
    _placed: ParallelState
    _ranks: Ranks
    _post_partition_hooks: OrderedDict[int, Callable[..., Any]]
    _post_step_hooks: OrderedDict[int, Callable[..., Any]]
    _session: Session
    _stages: Stages
    _state: ModelState
    _accumulation: GradientAccumulation

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or name.startswith("__"):
                raise
        module = super().__getattr__("module")
        try:
            return getattr(module, name)
        except AttributeError as error:
            if error.name != name or error.obj is not module or hasattr(type(module), name):
                raise  # of a property of the module's
        kind = type(module).__name__
        raise SMPAttributeError(
            f"the wrapped model has no attribute {name!r}: neither smp.DistributedModel nor the {kind} inside it has one",
            name=name,
            obj=module,
            code="SMP303",
        )

    def get_module(self) -> nn.Module:
        """Return the user's module."""
        return self.module

    @property
    def is_whole_copy(self) -> bool:
        """Return whether :meth:`cpu` has replaced this rank's part by a whole copy, which needs no other rank."""
        return self._placed.is_copied

    def _alias_module(self) -> None:
        # Scripts unwrap one, two or three levels; the module answers for each of them. Written past
        # nn.Module.__setattr__, so it is no submodule and appears in no state_dict.
        if not hasattr(self.module, "module"):
            self.module.__dict__["module"] = self.module

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules under their names in the unwrapped module, so that all names agree with ``state_dict``."""
        yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    @property
    def registry(self) -> ParameterRegistry:
        """Return names and places of all parameters."""
        return self._part.registry

    def local_modules(self) -> Iterator[nn.Module]:
        """Return an iterator over the modules of this rank's stage."""
        return self._part.modules()

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Return an iterator over the modules of this rank's stage, with names."""
        return self._part.named_modules()

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Return an iterator over the parameters of this rank's stage."""
        return self._part.parameters()

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return an iterator over the parameters of this rank's stage, with names."""
        return self._part.named_parameters()

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """Return an iterator over the buffers of this rank's stage."""
        return self._part.buffers()

    def local_named_buffers(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Return an iterator over the buffers of this rank's stage, with names."""
        return self._part.named_buffers(remove_duplicate=remove_duplicate)

    def virtual_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the values that this rank's optimizer updates, by parameter name; with sharded state, its own parts."""
        return self._placed.updated(self._part)

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters with gradients that are reduced over the ``DP`` group."""
        return ((record.name, record.parameter) for record in self.registry.reduced_over(Group.DP))

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters with gradients that are reduced over the ``RDP`` group: those of distributed modules."""
        return ((record.name, record.parameter) for record in self.registry.reduced_over(Group.RDP))

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Return an iterator over the modules that are split over tensor parallel ranks."""
        return (module for module in self.module.modules() if hasattr(module, "tensor_slices"))

    def is_distributed_parameter(self, param: nn.Parameter) -> bool:
        """Return whether a parameter is split over tensor parallel ranks."""
        return self.registry.record_of(param).placement.tensor_axis is not None

    def is_scaled_batch_parameter(self, param: nn.Parameter) -> bool:
        """Return whether a parameter sees the batch of the whole tensor parallel group."""
        return self.registry.record_of(param).reduction is Group.RDP

    def is_distributed_buffer(self, buf: torch.Tensor) -> bool:
        """Return whether a buffer is split over tensor parallel ranks.

        A distributed module has a slice under its name then.
        """
        return any(name in module.tensor_slices for module, name in self._distributed_owners(buf))

    def is_scaled_batch_buffer(self, buf: torch.Tensor) -> bool:
        """Return whether a buffer sees the batch of the whole tensor parallel group.

        A buffer of a distributed module does, unless the module sets ``module.reductions[name] = Group.DP``, as for a
        parameter.
        """
        owners = self._distributed_owners(buf)
        return any(module.reductions.get(name, Group.RDP) is Group.RDP for module, name in owners)

    def _distributed_owners(self, buf: torch.Tensor) -> Iterator[tuple[DistributedModule, str]]:
        """Yield each distributed module that directly has a buffer, with the buffer's name in it."""
        for module in self.module.modules():
            if isinstance(module, DistributedModule):
                yield from ((module, name) for name, own in module._buffers.items() if own is buf)

    # -- copies ----------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return an unwrapped copy, which no rank shares and nothing reduces, such as ``AveragedModel`` keeps, or a teacher.

        Raises:
            SMPUserError: this rank has parts of the parameters only, or their half precision copies.
        """
        made = memo[id(self)] = self._copied("copied (copy.deepcopy, AveragedModel)")
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the unwrapped module for ``pickle`` and ``torch.save``; loading returns that module."""
        made = self._copied("pickled (pickle, torch.save)")
        return operator.itemgetter(0), ([made],)  # loads the module itself, even if this library is not installed

    def __copy__(self) -> WrappedModule:
        made = type(self).__new__(type(self))
        made.__dict__.update(vars(self))
        return made

    def _copied(self, how: str) -> nn.Module:
        cfg, module = self._ranks.cfg, self.module
        degrees = (
            ("sharded_data_parallel_degree", cfg.sharded_data_parallel_degree),
            ("tensor_parallel_degree", self._ranks.size(Group.TP)),
            ("pipeline_parallel_degree", self._ranks.size(Group.PP)),
        )
        divided = [f"{name} is {degree}" for name, degree in degrees if degree > 1]
        if divided and not self.is_whole_copy:
            raise SMPUserError(
                f"a wrapped model cannot be {how}: {' and '.join(divided)}, so this rank has only parts of the "
                f"{type(module).__name__}; call model.state_dict() on every rank and save it, or load it into an unwrapped "
                f"{type(module).__name__}; for an average of weights, keep one of each value of model.state_dict()",
                code="SMP303",
            )
        if self.precision.is_half:
            raise SMPUserError(
                f"a wrapped model cannot be {how} while it trains in {self.precision.compute}: the copy would have rounded "
                "weights, whose averages hardly move, and would not cast its inputs; load model.state_dict() into an unwrapped "
                f"{type(module).__name__} in float32, and average there",
                code="SMP303",
            )
        return plain_copy(module)

    # -- its device ------------------------------------------------------------------------------------------------

    def cpu(self) -> WrappedModule:
        """Move the full model to CPU memory, to save or evaluate it; before it is partitioned, do nothing.

        If a rank has only a part (pipeline, tensor and sharded data parallelism), all ranks call it together. Each gets a whole
        copy: ``model(x)``, ``model.state_dict()`` and ``model.module`` then need no other rank. :meth:`cuda` returns to the part,
        which has stayed on its device.

        Otherwise the model itself moves, and training on a GPU continues after :meth:`cuda`. This does not hold in half precision
        or with sharded optimizer state, since the weights have left the memory that is updated.

        Raises:
            SMPUserError: the model holds something that cannot be copied.
        """
        if not self._stages.partitioned or self._placed.is_copied:
            return self
        if (
            self._part.stage_of is None
            and self._placed.shards is None
            and not any(True for _ in self.distributed_modules())
        ):
            self._placed.is_away = self._ranks.device.type != "cpu"
            return super().to("cpu")
        state = self._state.gathered(self._state.local(), to_first=False)
        self.module = whole_copy(self.module, dict(state), TensorGroup.of(self._ranks))
        self._placed.is_away = self._placed.is_copied = True
        return self

    def cuda(self, device: Any = None) -> WrappedModule:
        """Move the model back to this rank's device after :meth:`cpu`, for any ``device``; else do nothing."""
        if self._placed.is_copied:
            self._part.module.train(self.training)
            self.module = self._part.module
        elif not self._placed.is_away or self._placed.optimizer_shards is not None:
            return self
        else:
            super().to(self._ranks.device)
        self._placed.is_away = self._placed.is_copied = False
        return self

    def to(self, *args: Any, **kwargs: Any) -> WrappedModule:
        """Apply a change of dtype; a device is ignored, because the wrapper places the model.

        After :meth:`cpu`, this rank's device brings the model back as :meth:`cuda` does.
        """
        device = device_asked_for(*args, **kwargs)
        dtype = dtype_asked_for(*args, **kwargs)
        is_ours = device is not None and device.type == self._ranks.device.type
        if is_ours and self._placed.is_away:
            self.cuda()
        if dtype is None:
            return self
        return super().to(dtype=dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> WrappedModule:
        """Apply ``fn`` to every tensor, for ``to``, ``half`` and the like.

        In half precision training, running buffers are not cast.

        Raises:
            SMPUserError: parameters would get another type, which their gradients' reduction and the optimizer do not know.
        """
        if self._accumulation.reduces or self._placed.optimizer_shards is not None:
            self._refuse_cast(fn)
        with self.precision.keeping_wide(self.module):
            return super()._apply(fn, recurse)

    def _refuse_cast(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for dtype in {p.dtype for p in self.module.parameters() if p.is_floating_point()}:
            made = fn(torch.empty(0, dtype=dtype)).dtype
            if made is not dtype:
                raise SMPUserError(
                    f"the model's {dtype} parameters cannot become {made} after it was wrapped: gradient reduction and the "
                    'optimizer already know them; cast it before smp.DistributedModel, or train with "fp16" or "bf16"',
                    code="SMP303",
                )

    # -- hooks -----------------------------------------------------------------------------------------------------

    def register_comm_hook(self, state: Any, callable: Callable[..., Any]) -> None:
        """Let a communication hook of PyTorch's DDP average the gradients; ``callable(state, bucket)`` returns a future.

        The hook averages over the data parallel ranks itself. Call it before the first step. ``smp.comm_hooks`` has hooks
        that send less.

        Raises:
            SMPUserError: no data parallelism, sharded data parallelism, or the hook averages over other ranks than have
                replicas of the parameters.
        """
        self._accumulation.hook = (state, callable)
        if self._stages.partitioned:
            self._accumulation.install_hook()

    def register_post_partition_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(model, optimizer)`` once the model is partitioned; at once when it already is."""
        handle = register_hook(self._post_partition_hooks, hook)
        if self._stages.partitioned:
            hook(self, self._session.optimizer)
        return handle

    def register_post_step_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(model, optimizer)`` once, after the next step-decorated call.

        Scripts load what needs the partition there, such as an optimizer's state; a hook that wants every step registers
        itself again.
        """
        return register_hook(self._post_step_hooks, hook)
