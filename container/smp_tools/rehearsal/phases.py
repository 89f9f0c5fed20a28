"""The current work of a rank: the phase of a step, and the module that runs its forward or backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from smp_runtime.tensors.module_boundaries import ModuleBoundaries
from smp_runtime.tensors.torch_private import backward_pass, running_node
from smp_tools.rehearsal.memory import RankPhase

if TYPE_CHECKING:
    from torch import nn


class _ThreadPhases(threading.local):
    """State of one thread."""

    def __init__(self) -> None:
        self.modules: list[str] = []  # modules with a running forward pass, the innermost last
        self.backward = (-1, "")  # the backward pass that came to a module last, and the module


class Phases:
    """The phases of all threads of a rank, found by PyTorch's global hooks, until :meth:`close`.

    Attributes:
        in_steps: whether the first step has begun.
        called: paths of the modules with a forward pass that has run.
        in_microbatch: whether the calling thread runs a microbatch.
    """

    def __init__(self) -> None:
        self._here = _ThreadPhases()
        self._names: dict[int, str] = {}
        self.called: set[str] = set()
        self._updating = False
        self.in_steps = False
        self.in_microbatch: Callable[[], bool] = lambda: False
        self._owners = ModuleBoundaries("rehearsal", self._reached)
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(lambda *_: self._update(True)),
            register_optimizer_step_post_hook(lambda *_: self._update(False)),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def name(self, model: nn.Module) -> None:
        """Use the paths of the model's modules as their names from now on."""
        for path, module in model.named_modules():
            self._names[id(module)] = path

    def where(self) -> RankPhase:
        """Return the phase and module of the calling thread."""
        node = running_node()
        modules = self._here.modules
        innermost = modules[-1] if modules else ""
        if node is not None:
            number, owner = self._here.backward
            # The owner belongs to one backward pass; another one may have begun since.
            is_current = number == backward_pass()
            if not modules and is_current:
                innermost = owner
            return RankPhase("backward", innermost)
        if modules or self.in_microbatch():
            return RankPhase("forward", innermost)
        if self._updating:
            return RankPhase("update", "")
        return RankPhase("outside" if self.in_steps else "start", "")

    def _enter(self, module: nn.Module, args: Any) -> None:
        modules = self._here.modules
        outer = modules[-1] if modules else None
        if backward_pass() == -1:
            self._owners.note(args, outer or "")
        name = self._names.get(id(module))
        if name is not None:
            self.called.add(name)
            modules.append(name)
        else:
            # A module that is not the model's counts as the one that calls it.
            modules.append(type(module).__name__ if outer is None else outer)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        modules = self._here.modules
        if modules:
            name = modules.pop()
            if backward_pass() == -1:
                self._owners.note(output, name)

    def _reached(self, owner: str) -> None:
        self._here.backward = backward_pass(), owner

    def _update(self, begins: bool) -> None:
        self._updating = begins
