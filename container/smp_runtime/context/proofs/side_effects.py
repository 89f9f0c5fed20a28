"""What a call leaves behind beside its results: tensors that it keeps, and what it changes in modules and other tensors.

Code that runs on slices may leave nothing behind: a loss that a mixture of experts stores would be that of some positions.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from smp_runtime.tensors.torch_private import TorchDispatchMode, schema_of, storage_key, tree_leaves

_Noted = dict[int, list[weakref.ref[torch.Tensor]]]

#: Attributes of these types change what a module computes, and may count what it has computed.
_NUMBERS = (int, float, bool, str, type(None))

#: Hooks of modules beside those that see results.
_OTHER_HOOKS = ("_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Followed(TorchDispatchMode):
    """Follow what is computed of some tensors, while it is entered.

    Args:
        tensors: those that are followed.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._followed: _Noted = {}
        self._made: _Noted = {}
        self._given = list(tensors)
        self._writes = False
        for tensor in self._given:
            _note(self._followed, tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note whether its results are of the tensors that are followed."""
        kwargs = kwargs or {}
        given = _tensors_in((args, kwargs))
        is_followed = any(_is_noted(self._followed, tensor) for tensor in given)
        if is_followed:
            for tensor in _written_by(func, args, kwargs):
                self._writes |= not _is_noted(self._followed, tensor) and not _is_noted(self._made, tensor)
                _note(self._followed, tensor)
        found = func(*args, **kwargs)
        for tensor in _tensors_in(found):
            _note(self._followed if is_followed else self._made, tensor)
        return found

    def leaves_something(self, results: Any) -> bool:
        """Return whether what was computed is kept by other than the results, or was written to other tensors."""
        if self._writes or self._has_kept(results):
            gc.collect()  # what only cycles of references keep is not kept
            return self._writes or self._has_kept(results)
        return False

    def _has_kept(self, results: Any) -> bool:
        expected = {_key_of(tensor) for tensor in [*_tensors_in(results), *self._given]}
        return any(
            key not in expected for key, noted in self._followed.items() if any(ref() is not None for ref in noted)
        )


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _key_of(tensor: torch.Tensor) -> int:
    return id(tensor) if tensor.layout is not torch.strided else storage_key(tensor)


def _note(noted: _Noted, tensor: torch.Tensor) -> None:
    noted.setdefault(_key_of(tensor), []).append(weakref.ref(tensor))


def _is_noted(noted: _Noted, tensor: torch.Tensor) -> bool:
    # Without a living tensor the key is that of a former storage.
    return any(ref() is not None for ref in noted.get(_key_of(tensor), ()))


def _written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    written = []
    schema = schema_of(func)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += _tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
    return written


class ModuleState:
    """Buffers and attributes of modules, to put back what a trial changes.

    Args:
        modules: all that the trial calls.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._attributes = [(module, _attributes_of(module), _copies(module)) for module in modules]
        self._buffers = [
            (buffer, buffer.detach().clone())
            for module, *_ in self._attributes
            for buffer in vars(module)["_buffers"].values()
            if buffer is not None
        ]

    def counts_something(self) -> bool:
        """Return whether a number of a module is another one."""
        for module, before, _ in self._attributes:
            numbers = [(name, value) for name, value in vars(module).items() if isinstance(value, _NUMBERS)]
            if any(before.get(name, value) != value for name, value in numbers):
                return True
        return False

    @torch.no_grad()
    def restore(self) -> None:
        """Put back buffers, attributes, and what lists and dictionaries among them hold."""
        for buffer, before in self._buffers:
            if not torch.equal(buffer, before):
                buffer.copy_(before)
        for module, attributes, copies in self._attributes:
            held = vars(module)
            for name in [name for name in held if name not in attributes]:
                del held[name]
            held.update(attributes)
            for container, before in copies:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(before)


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return dict(vars(module))


def _copies(module: nn.Module) -> list[tuple[Any, Any]]:
    """Return the lists, dictionaries and sets among a module's attributes, and copies."""
    found = [value for name, value in vars(module).items() if name == "_buffers" or not name.startswith("_")]
    return [(value, value.copy()) for value in found if type(value) in (list, dict, set)]


def mode_of(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """Return the numbers and names among modules' attributes, such as ``training``, which decide what they compute."""
    found: list[Any] = []
    for module in modules:
        if type(module).__module__.startswith("torch.nn."):
            found.append(module.training)
        else:
            found += [value for value in vars(module).values() if isinstance(value, _NUMBERS)]
    return tuple(found)


class Observers:
    """The hooks of a script that see what modules compute.

    Args:
        modules: those whose hooks count.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)

    def change_something(self) -> bool:
        """Return whether there are hooks that see inputs before a module runs, or gradients."""
        return any(_has_foreign(module, kind) for module in self._modules for kind in _OTHER_HOOKS)

    def count(self) -> int:
        """Return the number of hooks that see results."""
        return sum(not is_ours(hook) for module in self._modules for hook in vars(module)["_forward_hooks"].values())

    @contextlib.contextmanager
    def replaced(self, call: Callable[..., Any]) -> Iterator[None]:
        """Let ``call(hook, module, *what the hook is given)`` run in place of each hook that sees results."""
        observed = [module for module in self._modules if _has_foreign(module, "_forward_hooks")]
        originals = [vars(module)["_forward_hooks"] for module in observed]
        for module, hooks in zip(observed, originals, strict=True):
            changed = OrderedDict(hooks)
            for key, hook in hooks.items():
                if not is_ours(hook):
                    changed[key] = functools.partial(call, hook)
            vars(module)["_forward_hooks"] = changed
        try:
            yield
        finally:
            for module, hooks in zip(observed, originals, strict=True):
                vars(module)["_forward_hooks"] = hooks


def _has_foreign(module: nn.Module, kind: str) -> bool:
    return not all(map(is_ours, (vars(module).get(kind) or {}).values()))


def is_ours(hook: Any) -> bool:
    """Return whether a hook is one of this library."""
    function = getattr(hook, "func", hook)
    name = getattr(function, "__module__", None) or type(function).__module__
    return str(name).startswith(("smp_", "smdistributed."))
