"""Switches that a script sets on modules: training or evaluation, adapters, and which parameters require gradients.

Every rank has all modules, those of other stages without elements. A script that changes a switch inside a step does so
on the root stage only, so calls carry the flags of the called module. Since other tasks run in between, on the same
modules, each task restores the flags that it had.

PEFT switches adapters off and on by attributes of the layers that have them, as for a reference model inside a step, and
freezes them while they are off. So a task also restores which parameters required gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from smp_runtime.errors import SMPUserError
from smp_runtime.microbatch_state.entries import ADAPTERS_OFF, ADAPTERS_ON
from smp_runtime.tensors.random_state import RandomState
from smp_runtime.tensors.torch_private import DisableTorchFunctionSubclass

if TYPE_CHECKING:
    from torch import nn


class _FlaggedModule(NamedTuple):
    """A module with all that is in it."""

    modules: list[nn.Module]  # itself and those in it; ``places`` are theirs among all modules
    places: list[int]
    #: Parameters in it that other stages have; ``foreign_places`` are theirs among all parameters.
    foreign: list[tuple[dict[str, Any], str]]
    foreign_places: list[int]
    #: The same for all in it.
    inside: list[tuple[dict[str, Any], str]]
    inside_places: list[int]
    #: Where the modules keep their training mode; empty if one of them keeps it elsewhere, as a ScriptModule.
    plain: list[dict[str, Any]]


class ModuleFlags:
    """The flags of all modules and parameters on one rank.

    Args:
        modules: by path, in one order on all ranks.
        find: a module by its path, or several that are called together.

    Attributes:
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
        self._parts: dict[str, _FlaggedModule] = {}
        #: By path, when the step began: flags of a part, and which of its parameters of other stages required gradients.
        self._begun: dict[str, bytes] = {}
        self._foreign_begun: dict[str, bytes] = {}
        #: When the step began.
        self._training = self._requires = b""
        #: Whether modules may have other flags than at the beginning of the step.
        self._differs = False
        #: Whether there are layers with adapters.
        self._has_adapters = False
        self._last: tuple[int, bytes] | None = None
        self.final: bytes | None = None

    # -- the step --------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Begin a step, and record its flags."""
        self._has_adapters = any(ADAPTERS_OFF in vars(module) for module in self._all)
        training, requires = _training(self._all), _requires(self._parameters)
        self._training, self._requires = training, requires
        self._begun.clear()
        self._foreign_begun.clear()
        self._differs, self._last, self.final = False, None, None

    @property
    def requires(self) -> bytes:
        """Return which parameters require gradients in this step, including those of other stages."""
        return self._requires

    @property
    def digest(self) -> bytes:
        """Return a digest of the modules' training flags and the parameters' ``requires_grad`` when the step began."""
        return hashlib.blake2b(self._training + self._requires, digest_size=16).digest()

    def check(self, requires: bytes, root_stage: int) -> None:
        """Compare with the flags of the root stage.

        Raises:
            SMPUserError: a parameter of this stage is frozen there but not here, or the other way round.
        """
        if requires == self._requires:
            return
        for (path, name), stage, mine, theirs in zip(self._names, self._stages, self._requires, requires, strict=True):
            if stage == self._stage and mine != theirs:
                full = f"{path}.{name}" if path else name
                raise SMPUserError(
                    f"parameter {full!r} has requires_grad={bool(mine)} on pipeline stage {stage}, where it lies, but "
                    f"requires_grad={bool(theirs)} on stage {root_stage}, which runs the step function; freeze and unfreeze "
                    "parameters between steps, and on every rank alike: for p in model.parameters(): p.requires_grad_(...)",
                    code="SMP303",
                )

    def step_function_ended(self, microbatch: int) -> None:
        """Record, on the root stage, the flags that the step function leaves; the last microbatch counts."""
        training = _training(self._all)
        self._differs = self._differs or training != self._training
        if self._last is None or microbatch > self._last[0]:
            self._last = microbatch, training

    def settle(self) -> bytes | None:
        """Return, on the root stage at the end of a step, the new flags of all ranks; None if they stay."""
        if self._last is not None and self._last[1] != self._training:
            self.final = self._last[1]
        return self.final

    def leave(self) -> None:
        """End the step, and give modules the flags that the step function has left, as in one process."""
        if self._differs or self.final is not None:
            _put(self._all, self._training if self.final is None else self.final)
            self._differs = False

    # -- calls of other stages -------------------------------------------------------------------------------------

    def of_call(self, path: str) -> bytes:
        """Return the training flags that go with a call of a module of another stage.

        Raises:
            SMPUserError: one of its parameters was frozen or unfrozen inside the step, and it is not called without gradients.
        """
        part = self._part(path)
        if not torch.is_grad_enabled():
            return self._training_of(part)
        requires, then = _requires(part.foreign), self._foreign_at_begin(path, part)
        if requires != then:
            changed = next(place for place, (one, other) in enumerate(zip(requires, then, strict=True)) if one != other)
            raise SMPUserError(
                f"module {path!r} of pipeline stage {self._stage_of(path)} was called on stage {self._stage} after requires_grad "
                f"of its parameter {part.foreign[changed][1]!r} was set to {bool(requires[changed])} inside the step, which its "
                "own stage does not see; freeze and unfreeze parameters between steps, on every rank, or detach what must not "
                "get gradients",
                code="SMP303",
            )
        return self._training_of(part)

    # -- tasks -----------------------------------------------------------------------------------------------------

    def seen_by(self, path: str) -> bytes | None:
        """Return the flags of the module that a task runs; None if the task runs no module."""
        if path not in self._parts and path not in self._modules:
            return None
        part = self._part(path)
        flags = self._training_of(part)
        if self._has_adapters:
            flags += _requires(part.inside)
        self._differs = self._differs or flags != self._at_begin(path, part)
        return flags

    def apply(self, path: str, flags: bytes | None) -> None:
        """Set the flags with which a task begins or goes on: those of its call, or those it has seen.

        None sets the flags from the beginning of the step.
        """
        if flags is None:
            if self._differs:
                _put(self._all, self._training)
                self._freeze(self._part(""), self._requires_at_begin(self._part("")))
                self._differs = False
            return
        part = self._part(path)
        begin = self._at_begin(path, part)
        flags += begin[len(flags) :]  # a call omits the flags that its own stage knows
        if self._differs or flags != begin:
            _put(part.modules, flags[: len(part.modules)])
            self._freeze(part, flags[len(part.modules) :])
            self._differs = True

    def _freeze(self, part: _FlaggedModule, requires: bytes) -> None:
        """Restore which parameters of a part require gradients, if adapters may have been switched."""
        if not self._has_adapters:
            return
        with DisableTorchFunctionSubclass():
            for (holder, name), flag in zip(part.inside, requires, strict=True):
                parameter = holder.get(name)
                if parameter is None:
                    continue
                is_trained = bool(flag)
                if parameter.requires_grad != is_trained:
                    parameter.requires_grad_(is_trained)

    def _training_of(self, part: _FlaggedModule) -> bytes:
        if part.plain and not self._has_adapters:
            return bytes([attributes["training"] for attributes in part.plain])
        return _training(part.modules)

    def _at_begin(self, path: str, part: _FlaggedModule) -> bytes:
        found = self._begun.get(path)
        if found is None:
            is_whole = len(part.places) == len(self._all)
            training = self._training if is_whole else bytes(map(self._training.__getitem__, part.places))
            found = self._begun[path] = training + self._requires_at_begin(part)
        return found

    def _foreign_at_begin(self, path: str, part: _FlaggedModule) -> bytes:
        found = self._foreign_begun.get(path)
        if found is None:
            found = self._foreign_begun[path] = bytes(map(self._requires.__getitem__, part.foreign_places))
        return found

    def _requires_at_begin(self, part: _FlaggedModule) -> bytes:
        return bytes(map(self._requires.__getitem__, part.inside_places)) if self._has_adapters else b""

    def _part(self, path: str) -> _FlaggedModule:
        if path not in self._parts:
            modules = [module for module in self._find(path).modules() if id(module) in self._place]
            held = {id(module._parameters) for module in modules}
            inside = [place for place, (holder, _) in enumerate(self._parameters) if id(holder) in held]
            foreign = [place for place in inside if self._stages[place] != self._stage]
            plain = [vars(module) for module in modules if _keeps_mode(module)]
            self._parts[path] = _FlaggedModule(
                modules,
                [self._place[id(module)] for module in modules],
                [self._parameters[place] for place in foreign],
                foreign,
                [self._parameters[place] for place in inside],
                inside,
                plain if len(plain) == len(modules) else [],
            )
        return self._parts[path]


class TaskState(RandomState):
    """The random numbers of a task, and the flags of the module that it runs (by path), between its segments."""

    def __init__(self, seed: int, device: torch.device, flags: ModuleFlags, path: str) -> None:
        super().__init__(seed, device)
        self._flags = flags
        self._path = path
        self._training: bytes | None = None

    def restore(self) -> None:
        """Restore random numbers and flags."""
        super().restore()
        self._flags.apply(self._path, self._training)

    def capture(self) -> None:
        """Save random numbers and flags."""
        super().capture()
        self._training = self._flags.seen_by(self._path)


def _keeps_mode(module: nn.Module) -> bool:
    return "training" in vars(module) and not hasattr(type(module), "training")


def _training(modules: Iterable[nn.Module]) -> bytes:
    """Return one number per module, as bytes.

    It is the sum of 1 in training, 2 with adapters off, and 4 times the number of the only adapter that is on.
    """
    numbers = bytearray()
    for module in modules:
        number = int(module.training)
        if ADAPTERS_OFF in module.__dict__:
            number += _adapter_switches(module)
        numbers.append(number)
    return bytes(numbers)


def _adapter_switches(module: Any) -> int:
    active, known = getattr(module, ADAPTERS_ON, None), _adapters(module)
    only = active[0] if isinstance(active, list | tuple) and len(active) == 1 else active
    number = known.index(only) + 1 if isinstance(only, str) and only in known else 0
    return 2 * bool(getattr(module, ADAPTERS_OFF)) + 4 * number


def _adapters(module: Any) -> list[str]:
    """Return the names of a layer's adapters, in one order on all ranks.

    There are at most as many as a flag can distinguish.
    """
    adapters: set[str] = set()
    for name in getattr(module, "adapter_layer_names", ()):
        holder = getattr(module, name, None)
        if holder is not None and hasattr(holder, "keys"):
            adapters.update(holder)
    # A flag is a byte: four times the number, and two switches.
    return sorted(adapters)[:62]


def _requires(parameters: Iterable[tuple[dict[str, Any], str]]) -> bytes:
    # A question to a parameter of another stage costs twenty times as much otherwise.
    with DisableTorchFunctionSubclass():
        return bytes([(p := holder.get(name)) is not None and p.requires_grad for holder, name in parameters])


def _put(modules: Iterable[nn.Module], training: bytes) -> None:
    for module, flag in zip(modules, training, strict=True):
        is_training = bool(flag & 1)
        if module.training != is_training:
            module.training = is_training
        if ADAPTERS_OFF not in vars(module):
            continue
        if module.training + _adapter_switches(module) != flag:
            setattr(module, ADAPTERS_OFF, bool(flag & 2))
            only = flag >> 2  # the number of the only adapter that is on, or 0
            if only:
                setattr(module, ADAPTERS_ON, [_adapters(module)[only - 1]])
