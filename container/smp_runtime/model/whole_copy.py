"""Copies of a wrapped model that need no other rank: ``model.cpu()`` gathers a whole one, ``copy.deepcopy(model)`` is local."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_records.script_lines import is_runtime_module
from smp_runtime.errors import SMPUserError
from smp_runtime.microbatch_state.remote_stubs import RemoteStub, RemoteStubAttribute
from smp_runtime.module_conversion import registration
from smp_runtime.module_conversion.splitting import become_whole
from smp_runtime.nn.distributed_module import DistributedModule

if TYPE_CHECKING:
    from smp_runtime.tensor_parallel.group import TensorGroup

#: Of a module: who answers its calls, and whether it is checkpointed; in a copy it does all itself.
_STANDING_IN = ("_call_impl", "_smp_checkpointing", "forward")


def whole_copy(module: nn.Module, state: dict[str, Any], group: TensorGroup) -> nn.Module:
    """Copy ``module`` with the values of ``state``, so that the copy needs no other ranks.

    Args:
        module: the wrapped module, as it is on this rank.
        state: whole tensors by the module's own names; it is emptied.
        group: the tensor parallel ranks that share its distributed modules.

    Raises:
        SMPUserError: the module holds something that cannot be copied.
    """
    alone = group.alone()
    memo = {id(group): alone, **_instead(module, state)}
    made = _copied(
        module,
        memo,
        f"model.cpu() makes a whole copy of the {type(module).__name__}, but something on it cannot be copied",
        "load model.state_dict(), called on every rank, into an unwrapped model instead",
    )
    for part in made.modules():
        become_whole(part)
        if isinstance(part, DistributedModule):
            part.become_whole(alone)
    return made


def plain_copy(module: nn.Module) -> nn.Module:
    """Copy a ``module`` that this rank has whole, on its device, without the library's hooks.

    Raises:
        SMPUserError: the module holds something that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        memo |= {id(value): replacement for value, replacement in _left_out(part)}
    return _copied(
        module,
        memo,
        f"the {type(module).__name__} inside smp.DistributedModel cannot be copied",
        "load model.state_dict() into an unwrapped model instead",
    )


def _copied(module: nn.Module, memo: dict[int, Any], problem: str, advice: str) -> nn.Module:
    try:
        made: nn.Module = copy.deepcopy(module, memo)
        for part in made.modules():
            _settle(part, memo)
    except Exception as error:  # code of any class on the module may raise anything
        raise SMPUserError(f"{problem} ({type(error).__name__}: {error}); {advice}", code="SMP303") from error
    return made


def _instead(module: nn.Module, state: dict[str, Any]) -> dict[int, Any]:
    """Return the replacements in the copy, by ``id`` of the original's objects."""
    memo: dict[int, Any] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is None or id(tensor) in memo:
                continue
            memo[id(tensor)] = _whole(tensor, f"{path}.{name}".lstrip("."), state)
        for value, replacement in _left_out(part):
            memo[id(value)] = replacement
    return memo


def _settle(part: nn.Module, memo: dict[int, Any]) -> None:
    """Make a copied module answer its own calls, and make its hooks refer to it in place of the original."""
    entries = vars(part)
    for name, value in list(entries.items()):
        if name in _STANDING_IN and value is None:
            del entries[name]  # the class's own method answers again
        elif _holds_hooks(name):
            entries[name] = copy.deepcopy(value, memo)


def _whole(tensor: torch.Tensor, name: str, state: dict[str, Any]) -> torch.Tensor:
    value = state.pop(name, None)
    if not isinstance(value, torch.Tensor):  # a buffer that no state has
        value = tensor
        if isinstance(tensor, RemoteStub):
            raise SMPUserError(
                f"model.cpu() gathers what model.state_dict() has, but {tensor.absent_name} lies on pipeline stage "
                f"{tensor.absent_stage} and is not in it; let the module that has it save it under its own name",
                code="SMP303",
            )
    value = value.detach().to("cpu", copy=True)
    return nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def _left_out(part: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield each object that a copy does not get, with its replacement."""
    for name, value in vars(part).items():
        if name in _STANDING_IN and _is_ours(value):
            yield value, None
        elif _holds_hooks(name) and isinstance(value, dict):
            yield value, _without_our_hooks(value)
        elif isinstance(value, RemoteStubAttribute):
            yield value, None  # the module sets it when it runs
        elif isinstance(value, torch.Tensor) and value.grad_fn is not None:
            is_elsewhere = isinstance(value, RemoteStub)
            yield value, None if is_elsewhere else value.detach().to("cpu", copy=True)


def _without_our_hooks(hooks: dict[Any, Any]) -> dict[Any, Any]:
    # The kinds are PyTorch's own, such as ``OrderedDict``, and modules rely on them.
    kept = type(hooks)(hooks)
    for key, hook in hooks.items():
        if _is_ours(hook):
            del kept[key]
    return kept


def _holds_hooks(name: str) -> bool:
    return name.endswith("_hooks")


def _is_ours(hook: Any) -> bool:
    """Return whether a function or object is the library's.

    Hooks that translate a replaced module's arguments do not count, since a copy keeps them.
    """
    hook = getattr(hook, "hook", hook)  # PyTorch wraps some
    place = str(getattr(hook, "__module__", ""))
    return is_runtime_module(place) and place != registration.__name__
