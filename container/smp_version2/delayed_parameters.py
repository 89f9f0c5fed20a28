"""Parameters of a model on the meta device get values when FSDP has divided the model, unit by unit."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from smp_config.errors import kind_of
from smp_runtime.errors import SMPUserError
from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.tensor_parallel.random_tracker import mix_seeds
from smp_version2.logs import get_logger
from smp_version2.modules import empty_module_params, move_buffers_to_device
from smp_version2.moe.experts import TabledExperts
from smp_version2.state import state

#: The method by which models of Transformers initialize a module; a model of a script may override it.
_OF_TRANSFORMERS = "_init_weights"


class DelayedParamIniter:
    """Gives parameters on the meta device their values, for ``param_init_fn`` of FSDP.

    Every rank draws the same numbers for parameters that it shares with others, and its part of one drawing for those that tensor
    parallelism has split: the model starts as in one process.

    Args:
        model: on the meta device, after ``tsm.transform``.
        init_method_using_config: initializes a module, given the model's configuration and the module; None takes the model's own
            ``_init_weights``, and PyTorch's ``reset_parameters`` for a module that this leaves out.
        verbose: whether to log each module.

    Raises:
        SMPUserError: no module.
    """

    def __init__(
        self,
        model: nn.Module,
        init_method_using_config: Callable[[Any, nn.Module], None] | None = None,
        verbose: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise SMPUserError(
                f"DelayedParamIniter got {kind_of(model)}; pass the model, an nn.Module on the meta device",
                code="SMP303",
            )
        self._model, self._initialize, self._verbose = model, init_method_using_config, verbose
        self._names = {module: name for name, module in model.named_modules()}
        self._late = sum(parameter.numel() for parameter in model.parameters() if parameter.is_meta)
        self._made = 0
        self._ties = _find_ties(model)
        ranks = state.joined
        self._seed = int(ranks.control.broadcast(torch.initial_seed() % (1 << 62), list(range(ranks.control.size))))

    def count_num_params(self, module: nn.Module, *_: Any) -> int:
        """Return the number of elements of a module's parameters on this rank, each once."""
        return sum(parameter.numel() for parameter in module.parameters())

    def get_param_init_fn(self) -> Callable[[nn.Module], None]:
        """Return the function for ``param_init_fn`` of FSDP, which gives one module's own parameters and buffers values."""
        return self._fill

    def get_post_param_init_fn(self) -> Callable[[nn.Module], None]:
        """Return the function for ``post_param_init_fn``; ties are made by the other one already, so it does nothing."""
        return lambda module: None

    @contextlib.contextmanager
    def validate_params_and_buffers_inited(self, enabled: bool = True) -> Iterator[None]:
        """Check, after the block, that every parameter and buffer has got values.

        Raises:
            AssertionError: one is on the meta device, or the numbers of elements differ.
        """
        yield
        if not enabled:
            return
        tensors = [*self._model.named_parameters(), *self._model.named_buffers()]
        missing = [name for name, tensor in tensors if tensor.is_meta]
        assert not missing, f"still on the meta device: {', '.join(missing[:5])}"
        assert self._made == self._late, f"{self._made} of {self._late} elements were initialized"

    # -- one module ------------------------------------------------------------------------------------------------

    def _fill(self, module: nn.Module) -> None:
        """Give a module's own parameters and buffers values, if they are on the meta device."""
        device = state.joined.device
        name = self._names.get(module, type(module).__name__)
        late = [key for key, parameter in module.named_parameters(recurse=False) if parameter.is_meta]
        if self._verbose and late:
            get_logger().info("initializing %s", name)
        self._make_buffers(module, name, device)
        move_buffers_to_device(module, device)
        if not late:
            return
        empty_module_params(module, device)
        forked = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(forked), torch.no_grad():
            whole = _make_whole(module, device)
            torch.manual_seed(mix_seeds(self._seed, zlib.crc32(name.encode())))
            self._call(whole, name)
            if whole is not module:
                _take_parts(module, whole)
        for key in late:
            other = self._ties.get((module, key))
            first = None if other is None else getattr(*other)
            if first is None or first.is_meta:
                self._made += module._parameters[key].numel()  # type: ignore[union-attr]
            else:
                setattr(module, key, first)

    def _call(self, module: nn.Module, name: str) -> None:
        """Initialize a whole module as the model does.

        Raises:
            SMPUserError: nothing knows how.
        """
        owner = next((part for part in self._model.modules() if hasattr(part, _OF_TRANSFORMERS)), None)
        if self._initialize is not None:
            self._initialize(getattr(owner, "config", None), module)
            return
        reset: Callable[[], None] | None = getattr(module, "reset_parameters", None)
        if reset is None and owner is None:
            raise SMPUserError(
                f"{name} ({type(module).__name__}) has parameters on the meta device, and neither it nor the model can initialize "
                "them (reset_parameters, _init_weights): pass init_method_using_config to DelayedParamIniter",
                code="SMP303",
            )
        if reset is not None:
            reset()
        else:  # a norm of Transformers, whose model sets what differs
            for parameter in module.parameters(recurse=False):
                nn.init.ones_(parameter)
        if owner is not None:
            getattr(owner, _OF_TRANSFORMERS)(module)

    def _make_buffers(self, module: nn.Module, name: str, device: torch.device) -> None:
        """Compute a module's buffers on the meta device: those of rotary positions.

        Raises:
            SMPUserError: another one.
        """
        late = [key for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if not late:
            return
        compute = getattr(module, "rope_init_fn", None)
        if compute is None or not set(late) <= {"inv_freq", "original_inv_freq"}:
            raise SMPUserError(
                f"the buffers {', '.join(late)} of {name} are on the meta device, and only {type(module).__name__} knows their "
                "values: create the model under accelerate's init_empty_weights(), which leaves buffers alone",
                code="SMP303",
            )
        values, _ = compute(module.config, device)
        for key in late:
            module._buffers[key] = values.clone()


def _find_ties(model: nn.Module) -> dict[tuple[nn.Module, str], tuple[nn.Module, str]]:
    """Return the places of parameters that another place has too, with that first one."""
    first: dict[int, tuple[nn.Module, str]] = {}
    found = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in first:
                found[module, name] = first[id(parameter)]
            else:
                first[id(parameter)] = (module, name)
    return found


def _make_whole(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a module like a split one was before, without values; any other as it is."""
    if isinstance(module, TabledExperts) and module.group.size > 1:
        return module.make_whole(device)
    if not isinstance(module, DistributedModule) or module.tensor_group.size == 1:
        return module
    rows, columns = module.tensor_slices["weight"].shape
    with device:
        if isinstance(module, nn.Embedding):
            return nn.Embedding(rows, columns, module.padding_idx)
        if getattr(getattr(module, "split", None), "transposed", False):
            from transformers.pytorch_utils import Conv1D  # the only class of linear maps that is kept so

            made: nn.Module = Conv1D(columns, rows)
            return made
        return nn.Linear(columns, rows, module.bias is not None)


def _take_parts(module: nn.Module, whole: nn.Module) -> None:
    """Copy this rank's parts of a whole module's parameters into a split one."""
    slices = module.tensor_slices if isinstance(module, DistributedModule) else {}
    for name, parameter in module.named_parameters(recurse=False):
        value = whole.get_parameter(name).to(parameter.dtype)
        where = slices.get(name)
        if where is not None:
            value = where.cut(value)
        if isinstance(module, TabledExperts):
            value = value[module.here.start : module.here.stop]
        parameter.copy_(value)
