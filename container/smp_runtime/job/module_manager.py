"""``smp.state.module_manager``: information about the distributed modules of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.errors import SMPRuntimeError

if TYPE_CHECKING:
    from torch import nn

#: From a state under one set of names to one under another.
Translate = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class ModuleManager:
    """Information about the distributed modules of this process.

    Attributes:
        translate_functions: for each kind of Hugging Face model that was distributed, the functions that translate its
            state to Hugging Face's names, and back.
    """

    def __init__(self) -> None:
        self.translate_functions: list[tuple[Translate, Translate]] = []

    def note(self, translations: tuple[Translate, Translate]) -> None:
        """Record the translations of a model that was distributed."""
        if translations not in self.translate_functions:
            self.translate_functions.append(translations)

    def translated(self, state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
        """Return a full state under Hugging Face's names.

        Entries that do not belong to a distributed Hugging Face model keep their names.

        Args:
            module: the wrapped module. Distributed Hugging Face models in it have ``state_names``.

        Raises:
            SMPRuntimeError: the translation lost or added elements.
        """
        result = dict(state)
        for path, part in module.named_modules(remove_duplicate=False):
            names = getattr(part, "state_names", None)
            prefix = f"{path}." if path else ""
            below = {name.removeprefix(prefix): v for name, v in result.items() if name.startswith(prefix)}
            if names is None or not below:
                continue
            others = {name: value for name, value in result.items() if not name.startswith(prefix)}
            theirs = names.part_to_theirs(part, below)
            result = {**{prefix + name: value for name, value in theirs.items()}, **others}
        before, after = _elements(state), _elements(result)
        if before != after:
            raise SMPRuntimeError(
                f"the model's state has {before} elements, but {after} under Hugging Face's names, so that it would be saved "
                "wrongly; save it with translate_if_full=False, under the names of the distributed model"
            )
        return result


def _elements(state: Mapping[str, Any]) -> int:
    """Count the elements of all tensors; a tensor with several names counts once."""
    once: dict[tuple[Any, ...], int] = {}
    for value in state.values():
        if not isinstance(value, torch.Tensor):
            continue
        key: tuple[Any, ...] = (id(value),)
        has_values = not value.is_meta and value.numel() > 0
        if has_values:
            key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        once[key] = value.numel()
    return sum(once.values())
