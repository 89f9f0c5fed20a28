"""The modules of a rank, their number of parameters, and the modules that no step has called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.job.trained import TrainedModel

#: Modules that are named.
_MOST_NAMES = 12


class ModuleInventory:
    """The modules and parameters of a rank's models.

    It is updated after every update of the optimizer, because a script may release its models at its end.

    Attributes:
        parameters: elements on this rank; of sharded parameters, its part.
        trained_parameters: of these, elements that have gradients.
        idle_parameters: of these, elements of modules that were never called.
        modules: paths of the modules of this rank, without those inside others of them.
        idle_modules: the same of modules with parameters that were never called.
    """

    def __init__(self) -> None:
        self.parameters = self.trained_parameters = self.idle_parameters = 0
        self.modules: list[str] = []
        self.idle_modules: list[str] = []

    def look(self, models: Sequence[TrainedModel], stage: int, called: set[str]) -> None:
        """Update the inventory from the models.

        Args:
            stage: of this rank.
            called: paths of modules with a forward pass that has run here.
        """
        self.parameters = self.trained_parameters = self.idle_parameters = 0
        here: list[str] = []
        idle: list[str] = []
        seen: set[int] = set()
        for model in models:
            ours: list[str] = []  # modules of this library, which may use submodules without calling them
            for path, module in model.module.named_modules():
                if model.assignment is not None and model.assignment.stage_of(path) != stage:
                    continue
                held, trained = _elements(module, seen)
                self.parameters += held
                self.trained_parameters += trained
                here.append(path)
                is_ours = type(module).__module__.startswith("smp_runtime.")
                if is_ours and path in called:
                    ours.append(path)
                is_used = path in called or any(path.startswith(f"{parent}.") for parent in ours)
                if not held or is_used:
                    continue
                # A script may use the parameters of a module that it does not call: these get gradients.
                has_gradient = any(p.grad is not None for p in module.parameters(recurse=False))
                if not has_gradient:
                    self.idle_parameters += held
                    idle.append(path)
        self.modules = _outermost(here)
        present = set(here)
        self.idle_modules = _outermost(dict.fromkeys(_whole(path, present, called) for path in idle))


def _elements(module: nn.Module, seen: set[int]) -> tuple[int, int]:
    """Return a module's own parameter elements that were not counted before: all of them, and the trained ones."""
    total = trained = 0
    for parameter in module.parameters(recurse=False):
        if not parameter.is_meta and id(parameter) not in seen:
            seen.add(id(parameter))
            part: Any = getattr(parameter, "ds_tensor", None)
            elements = parameter.numel() if part is None else part.numel()
            total += elements
            trained += elements if parameter.requires_grad else 0
    return total, trained


def _whole(path: str, here: set[str], called: set[str]) -> str:
    """Return the outermost module around an idle module that contains no called module."""
    parent = path.rpartition(".")[0]
    while parent in here and parent and not any(one == parent or one.startswith(f"{parent}.") for one in called):
        path, parent = parent, parent.rpartition(".")[0]
    return path


def _outermost(paths: Iterable[str]) -> list[str]:
    """Return the paths without the model itself, and without modules inside others in the list."""
    found: list[str] = []
    for path in paths:
        names = path.split(".")
        parents = {".".join(names[:length]) for length in range(1, len(names))}
        is_inside = not parents.isdisjoint(found)
        if path and not is_inside:
            found.append(path)
    return found[:_MOST_NAMES]
