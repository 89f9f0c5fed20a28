"""Parameters that several modules share, and whether they still share them when training begins.

``to_empty()``, ``load_state_dict(assign=True)`` and ``fully_shard`` of single modules can give each module a parameter of its own.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class ParameterTies:
    """Follows which parameter each module was given by the script."""

    def __init__(self) -> None:
        self._given: weakref.WeakKeyDictionary[nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()
        self._numbers: dict[int, tuple[weakref.ref[nn.Parameter], int]] = {}
        self._next = itertools.count()
        self._is_loading = False
        self._handle: RemovableHandle | None = None

    def begin(self) -> None:
        """Follow all modules that are made from now on."""
        self._handle = register_module_parameter_registration_hook(self._registered)
        self._follow_loading()

    def end(self) -> None:
        """Follow no more modules."""
        if self._handle is not None:
            self._handle.remove()

    def _follow_loading(self) -> None:
        original = nn.Module.load_state_dict

        def load_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._is_loading = True
            try:
                return original(module, *args, **kwargs)
            finally:
                self._is_loading = False

        nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign,assignment]

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # A script that loads weights does not mean to untie them.
        if parameter is not None and not self._is_loading:
            self._given.setdefault(module, {})[name] = self._number(parameter)

    def _number(self, parameter: nn.Parameter) -> int:
        """Return a number that no other parameter has, also after this one is gone."""
        known = self._numbers.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return known[1]
        number = next(self._next)
        # The reference shows whether the id still belongs to this parameter.
        self._numbers[id(parameter)] = weakref.ref(parameter), number
        return number

    def broken(self, model: nn.Module) -> list[list[str]]:
        """Return groups of names that were one parameter of a model, and are several now."""
        groups: dict[int, dict[str, nn.Parameter | None]] = {}
        for path, module in model.named_modules():
            for name, number in self._given.get(module, {}).items():
                full = f"{path}.{name}" if path else name
                groups.setdefault(number, {})[full] = module._parameters.get(name)
        broken = []
        for group in groups.values():
            parameters = {id(now) for now in group.values()}
            if len(parameters) > 1:
                broken.append(sorted(group))
        return broken
