"""What a script switches on modules: training or evaluation, and which parameters require gradients.

Every rank has all modules, those of other stages without elements. A script that switches them inside a step does so on
the root stage only, so calls carry the flags of what they call; and since other tasks run in between, on the same
modules, each task finds the flags again that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.random_state import RandomState
from smp_runtime.tensors.torch_private import DisableTorchFunctionSubclass


class Part:
    """A module with all that is in it.

    Attributes:
        modules: itself and those in it.
        training: their flags when the step began.
        foreign: parameters in it that other stages have, as the dictionary that holds each and its name there.
        requires: their flags when the step began.
        version: of the flags of the model that these are part of.
    """

    def __init__(
        self, modules: list[nn.Module], places: list[int], foreign: list[int], parameters: Sequence[Any]
    ) -> None:
        self.modules = modules
        self.foreign = [parameters[place] for place in foreign]
        self._places = places
        self._foreign_places = foreign
        self.training = self.requires = b""
        self.version = -1

    def renew(self, training: bytes, requires: bytes, version: int) -> None:
        """The model's flags are others than in the step before."""
        self.training = bytes([training[place] for place in self._places])
        self.requires = bytes([requires[place] for place in self._foreign_places])
        self.version = version


class Switches:
    """The flags of all modules and parameters on one rank.

    Args:
        modules: by path, in one order on all ranks.
        stage_of: stage of a module by path.
        stage: this rank's.
        find: a module by its path, or several that are called together.

    Attributes:
        toggles: how often parameters were frozen or unfrozen between steps.
        final: training flags of all modules that the step function has left, if it has changed any.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        stage_of: Callable[[str], int],
        stage: int,
        find: Callable[[str], nn.Module],
    ) -> None:
        self._modules = modules
        self._find = find
        self._stage_of = stage_of
        self._stage = stage
        self._all = list(modules.values())
        self._place = {id(module): place for place, module in enumerate(self._all)}
        #: By the dictionary that holds it and its name: another parameter may take its place.
        #: Those of a ScriptModule, no dictionary, cannot be replaced, and its flags cannot be set apart.
        plain = {path: module for path, module in modules.items() if isinstance(module._parameters, dict)}
        self._parameters = [(module._parameters, name) for module in plain.values() for name in module._parameters]
        self._names = [(path, name) for path, module in plain.items() for name in module._parameters]
        self._stages = [stage_of(path) for path, _ in self._names]
        self._parts: dict[str, Part] = {}
        self._version = 0
        self._training = b""
        self._requires: bytes | None = None
        #: Whether modules may have other flags than at the beginning of the step.
        self._differs = False
        self._last: tuple[int, bytes] | None = None
        self.toggles = 0
        self.final: bytes | None = None

    # -- the step --------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """A step begins."""
        training, requires = _training(self._all), _requires(self._parameters)
        if training != self._training or requires != self._requires:
            self._version += 1
        if self._requires is not None and requires != self._requires:
            self.toggles += 1
        self._training, self._requires = training, requires
        self._differs, self._last, self.final = False, None, None

    @property
    def requires(self) -> bytes:
        """Which parameters require gradients in this step, those of other stages among them."""
        return self._requires or b""

    def check(self, requires: bytes, root_stage: int) -> None:
        """Compare with what the root stage has.

        Raises:
            SMPUserError: it takes a parameter of this stage for frozen that is not, or the other way round.
        """
        if requires == self.requires:
            return
        for (path, name), stage, mine, theirs in zip(self._names, self._stages, self.requires, requires, strict=True):
            if stage == self._stage and mine != theirs:
                full = f"{path}.{name}" if path else name
                raise SMPUserError(
                    f"parameter {full!r} has requires_grad={bool(mine)} on pipeline stage {stage}, where it lies, but "
                    f"requires_grad={bool(theirs)} on stage {root_stage}, which runs the step function; freeze and unfreeze "
                    "parameters between steps, and on every rank alike: for p in model.parameters(): p.requires_grad_(...)"
                )

    def step_function_ended(self, microbatch: int) -> None:
        """On the root stage: note what the step function leaves; the last microbatch counts."""
        training = _training(self._all)
        self._differs = self._differs or training != self._training
        if self._last is None or microbatch > self._last[0]:
            self._last = microbatch, training

    def settle(self) -> bytes | None:
        """On the root stage, at the end of a step: the flags that all ranks have from now on, None if they stay."""
        if self._last is not None and self._last[1] != self._training:
            self.final = self._last[1]
        return self.final

    def leave(self) -> None:
        """The step is over: modules have the flags that the step function has left, as in one process."""
        if self._differs or self.final is not None:
            _put(self._all, self._training if self.final is None else self.final)
            self._differs = False

    # -- calls of other stages -------------------------------------------------------------------------------------

    def of_call(self, path: str) -> bytes:
        """The training flags that go with a call of a module of another stage.

        Raises:
            SMPUserError: one of its parameters was frozen or unfrozen inside the step.
        """
        part = self._part(path)
        if part.foreign and (requires := _requires(part.foreign)) != part.requires:
            flags = zip(part.foreign, requires, part.requires, strict=True)
            (_, name), now = next((parameter, now) for parameter, now, then in flags if now != then)
            raise SMPUserError(
                f"module {path!r} of pipeline stage {self._stage_of(path)} was called on stage {self._stage} after requires_grad "
                f"of its parameter {name!r} was set to {bool(now)} inside the step, which its own stage does not see; freeze and "
                "unfreeze parameters between steps, on every rank, or detach what must not get gradients"
            )
        return _training(part.modules)

    def apply(self, path: str, training: bytes) -> None:
        """A call has come: its module, and all in it, get the flags that they have for the caller."""
        part = self._part(path)
        if _training(part.modules) != training:
            _put(part.modules, training)
            self._differs = True

    # -- tasks -----------------------------------------------------------------------------------------------------

    def seen_by(self, path: str) -> bytes | None:
        """The flags of what a task runs; None for a task that runs no module."""
        if path not in self._parts and path not in self._modules:
            return None
        part = self._part(path)
        training = _training(part.modules)
        self._differs = self._differs or training != part.training
        return training

    def bring(self, path: str, training: bytes | None) -> None:
        """A task goes on, with the flags that it has seen, or those of the beginning of the step."""
        if training is None:
            if self._differs:
                _put(self._all, self._training)
                self._differs = False
            return
        part = self._part(path)
        if self._differs or training != part.training:
            _put(part.modules, training)
            self._differs = True

    def _part(self, path: str) -> Part:
        part = self._parts.get(path)
        if part is None:
            modules = [module for module in self._find(path).modules() if id(module) in self._place]
            held = {id(module._parameters) for module in modules}
            places = [place for place, (holder, _) in enumerate(self._parameters) if id(holder) in held]
            foreign = [place for place in places if self._stages[place] != self._stage]
            part = Part(modules, [self._place[id(module)] for module in modules], foreign, self._parameters)
            self._parts[path] = part
        if part.version != self._version:
            part.renew(self._training, self.requires, self._version)
        return part


class TaskState(RandomState):
    """The random numbers of a task, and the flags of the modules that it runs, between its segments.

    Args:
        seed: where the task's random numbers begin.
        device: of this rank.
        switches: of this rank.
        path: of the module that the task runs; the whole model for the step function.
    """

    def __init__(self, seed: int, device: torch.device, switches: Switches, path: str) -> None:
        super().__init__(seed, device)
        self._switches = switches
        self._path = path
        self._training: bytes | None = None

    def restore(self) -> None:
        super().restore()
        self._switches.bring(self._path, self._training)

    def capture(self) -> None:
        super().capture()
        self._training = self._switches.seen_by(self._path)


def _training(modules: Sequence[nn.Module]) -> bytes:
    return bytes([module.training for module in modules])


def _requires(parameters: Sequence[tuple[dict[str, Any], str]]) -> bytes:
    with DisableTorchFunctionSubclass():  # a question to a parameter of another stage costs twenty times as much
        return bytes([(p := holder.get(name)) is not None and p.requires_grad for holder, name in parameters])


def _put(modules: Sequence[nn.Module], training: bytes) -> None:
    for module, flag in zip(modules, training, strict=True):
        if module.training != flag:
            module.training = bool(flag)
