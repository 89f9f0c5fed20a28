"""A model before it was wrapped: enough data to rebuild it, without its weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from smp_records.script_lines import is_runtime_module
from smp_runtime.microbatch_state.replaced_parameters import ReplacedParameter, settle, stand_in
from smp_runtime.tensors.torch_private import gradient_hooks, set_gradient_hooks

#: Entries of a module that are dictionaries of hooks; the script may add to them at any time.
_HOOKS = "_hooks"
#: Values that scripts set on modules while they train, such as the probability of a dropout.
_PLAIN = (bool, int, float, str, type(None))
_ABSENT = object()


@dataclass(frozen=True)
class ParameterShape:
    """A parameter without its values.

    Attributes:
        kind: its class.
        attributes: attributes that the script has set on it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    kind: type
    attributes: Mapping[str, Any]


class Blueprint:
    """A model as the script has given it: modules, attributes, hooks and buffers, and the shapes of its parameters.

    The modules are the script's own, so that what holds them goes on holding the model when it is built anew.

    Attributes:
        problem: why the model cannot be built anew, in words; empty if it can.
        parameter_names: all names of each parameter, in the order of ``module.parameters()``.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.problem = ""
        named = list(module.named_parameters(remove_duplicate=False))
        names: dict[int, list[str]] = {id(parameter): [] for _, parameter in named}
        for name, parameter in named:
            names[id(parameter)].append(name)
        self.parameter_names = [tuple(found) for found in names.values()]
        self._shapes: list[ParameterShape] = []
        self._kept: list[tuple[nn.Module, type, dict[str, Any]]] = []
        self._settings: dict[int, dict[str, Any]] = {}
        self._stand_ins: list[ReplacedParameter] = []
        numbers: dict[int, int] = {}
        for part in module.modules():
            if isinstance(part, torch.jit.ScriptModule):
                self.problem = f"its {type(part).__name__} is TorchScript"
            entries = {key: _copied(value) for key, value in vars(part).items() if not _is_of_parameters(value)}
            registry = vars(part).get("_parameters")
            entries["_parameters"] = numbered = {}
            for name, parameter in registry.items() if isinstance(registry, dict) else ():
                numbered[name] = None if parameter is None else self._number(parameter, numbers)
            self._kept.append((part, type(part), entries))

    def _number(self, parameter: nn.Parameter, numbers: dict[int, int]) -> int:
        """Return the number of a parameter's shape; a parameter with several names has one number."""
        if id(parameter) not in numbers:
            numbers[id(parameter)] = len(self._shapes)
            shape = ParameterShape(
                tuple(parameter.shape), parameter.dtype, parameter.requires_grad, type(parameter), dict(vars(parameter))
            )
            self._shapes.append(shape)
        return numbers[id(parameter)]

    def _shapes_by_now(self) -> list[ParameterShape]:
        """Return the parameters' shapes with their present types, if the script's modules still have them."""
        shapes = list(self._shapes)
        for part, _, entries in self._kept:
            registry = vars(part).get("_parameters")
            if not isinstance(registry, dict):
                continue
            for name, number in entries["_parameters"].items():
                now = registry.get(name)
                if number is not None and now is not None:
                    shapes[number] = replace(shapes[number], dtype=now.dtype)
        return shapes

    def modules(self) -> Iterator[nn.Module]:
        """Return an iterator over the modules that the script has passed."""
        return (part for part, _, _ in self._kept)

    def listened_elsewhere(self, module: nn.Module) -> list[str]:
        """Return the names of parameters with gradient hooks of the script in modules that a strategy has created."""
        own: set[int] = set()
        for part in self.modules():
            registry = vars(part).get("_parameters") or {}
            own.update(map(id, registry.values()))
        found = []
        for name, parameter in module.named_parameters():
            is_own = id(parameter) in own
            if not is_own and _is_listened_to(parameter):
                found.append(name)
        return found

    def note_wrapped(
        self, module: nn.Module, replaced: Callable[[nn.Parameter, nn.Parameter], None] = lambda former, now: None
    ) -> None:
        """Free the weights of modules that strategies have replaced.

        The script may still hold such a module, and ask for shapes.

        Args:
            module: the model that strategies have made of the script's.
            replaced: is called with each freed parameter, and its replacement in the replaced module.
        """
        there = {id(part) for part in module.modules()}
        used = {id(parameter) for parameter in module.parameters()}
        made: dict[int, ReplacedParameter] = {}
        for part, _, _ in self._kept:
            registry = vars(part).get("_parameters")
            if id(part) in there or not isinstance(registry, dict):
                continue
            for name, parameter in registry.items():
                if parameter is None or id(parameter) in used:
                    continue
                if id(parameter) not in made:
                    made[id(parameter)] = stand_in(parameter, type(part).__name__)
                    replaced(parameter, made[id(parameter)])
                registry[name] = made[id(parameter)]
        self._stand_ins = list(made.values())

    def note_settings(self, device: torch.device, dtype: torch.dtype | None) -> None:
        """Record plain attributes once the model is placed; later changes of them are the script's.

        Args:
            device: device of the weights.
            dtype: type of the weights in half precision training; None if they have the types that the script has chosen.
        """
        self._settings = {id(part): _plain(part) for part, _, _ in self._kept}
        for parameter in self._stand_ins:
            settle(parameter, device, dtype)

    def build(
        self,
        parameter: Callable[[ParameterShape], nn.Parameter],
        buffer: Callable[[torch.Tensor], torch.Tensor],
        *,
        types_stay: bool = False,
    ) -> nn.Module:
        """Rebuild the model as it was, with new parameters.

        Later changes of the script are kept: modes, flags of parameters, plain attributes, and hooks of modules and
        gradients.

        Args:
            parameter: creates a parameter.
            buffer: creates a buffer in place of one that had no values.
            types_stay: whether parameters keep their present types, which the script has given them.
        """
        made = [parameter(shape) for shape in (self._shapes_by_now() if types_stay else self._shapes)]
        buffers: dict[int, torch.Tensor] = {}  # new ones, by those that were there
        for part, kind, entries in self._kept:
            since = dict(vars(part))
            settings = {
                key: value
                for key, value in _plain(part).items()
                if key in entries and self._settings.get(id(part), {}).get(key, _ABSENT) not in (_ABSENT, value)
            }
            for name, number in entries["_parameters"].items():
                now = since["_parameters"].get(name) if isinstance(since.get("_parameters"), dict) else None
                if number is not None and now is not None and now.is_leaf:
                    made[number].requires_grad_(now.requires_grad)
                    set_gradient_hooks(made[number], *map(_without_own, gradient_hooks(now)))
            part.__class__ = kind
            vars(part).clear()
            vars(part).update({key: _copied(value) for key, value in entries.items()})
            part._parameters = {
                name: None if number is None else made[number] for name, number in entries["_parameters"].items()
            }
            for name, value in entries["_buffers"].items():
                if value is not None and id(value) not in buffers:
                    buffers[id(value)] = buffer(value) if value.is_meta else value.clone()
                part._buffers[name] = None if value is None else buffers[id(value)]
            vars(part).update(settings)
            if "training" in since:
                part.training = since["training"]
            _add_hooks(vars(part), since)
        return self.module


def _is_of_parameters(value: Any) -> bool:
    """Return whether a value is a parameter, or was computed from some.

    Such a value is not kept here: it belongs to the parameters, and would keep them alive.
    """
    return isinstance(value, torch.Tensor) and value.requires_grad


def _copied(value: Any) -> Any:
    """Return a shallow copy of a plain container, or any other value unchanged.

    A container with parameters, or values computed from them, is not copied either.
    """
    if type(value) not in (dict, OrderedDict, list, set):
        return value
    inside = value.values() if isinstance(value, dict) else value
    return value if any(_is_of_parameters(each) for each in inside) else value.copy()


def _plain(part: nn.Module) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in vars(part).items():
        is_plain = type(value) in _PLAIN
        if is_plain and key != "training":
            plain[key] = value
    return plain


def _add_hooks(entries: dict[str, Any], since: Mapping[str, Any]) -> None:
    """Keep hooks that are not this library's and came later."""
    for name, hooks in since.items():
        if not name.endswith(_HOOKS):
            continue
        kept = entries.get(name)
        # A module may keep something else under such a name.
        if not isinstance(hooks, dict) or not isinstance(kept, dict):
            continue
        foreign = {key: hook for key, hook in hooks.items() if not _is_own(hook)}
        # Those that are there stay at their places: hooks run in this order.
        for key, hook in foreign.items():
            kept.setdefault(key, hook)


def _is_listened_to(parameter: nn.Parameter) -> bool:
    """Return whether the script has registered a gradient hook on a parameter."""
    hooks: list[Any] = []
    for registered in gradient_hooks(parameter):
        hooks += (registered or {}).values()
    return not all(map(_is_own, hooks))


def _without_own(hooks: dict[int, Any] | None) -> dict[int, Any] | None:
    """Remove this library's hooks from a dictionary of hooks, in place: handles of the script refer to it."""
    if hooks:
        for key in [key for key, hook in hooks.items() if _is_own(hook)]:
            del hooks[key]
    return hooks


def _is_own(hook: Any) -> bool:
    return is_runtime_module(_home(hook))


def _home(hook: Any) -> str:
    """Return the Python module that defines a hook, past PyTorch's wrapper and partial calls."""
    while (inner := getattr(hook, "hook", None) or getattr(hook, "func", None)) is not None:
        hook = inner
    owner = getattr(hook, "__self__", None)
    return str(getattr(hook, "__module__", None) or type(hook if owner is None else owner).__module__)
