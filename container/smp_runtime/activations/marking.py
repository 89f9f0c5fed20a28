"""Modules that are marked to keep only their inputs for backward, by the script or by a model that checkpoints itself."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from smp_config.errors import kind_of
from smp_runtime.activations.activations import Activations, StagedRegions
from smp_runtime.activations.caches import is_cache
from smp_runtime.activations.functional import Strategy, check_sequential, checkpoint, run_sequential
from smp_runtime.activations.regions import is_off, run_region
from smp_runtime.errors import SMPUserError
from smp_runtime.job import session as sessions
from smp_runtime.tensors import module_calls

logger = logging.getLogger("smp")

_MARK = "_smp_checkpointing"
#: By which a model of Transformers checkpoints itself: whether it does, and how.
FLAG, FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
#: The method of such a model that sets both on all of its modules.
_SWITCH = "_set_gradient_checkpointing"


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """Keep only the inputs of a module for backward, which computes the rest again.

    The module may be part of a model that is wrapped already or will be. Call it before the first step: a later call counts
    from the next step on, but the automatic partition of a pipeline has been decided without it. Of an
    ``nn.Sequential`` or an ``nn.ModuleList`` the children are checkpointed. A checkpointed module inside another one is
    part of that: the outermost counts.

    Args:
        module: any module.
        preserve_rng_state: False lets dropout draw other numbers the second time, which saves keeping the generators' state.
        pack_args_as_tuple: only for an ``nn.Sequential``. Its children get a tuple as one argument in any case, as they do
            without checkpointing.
        strategy: only for an ``nn.Sequential``: ``"each"`` child on its own, ``"contiguous"``: all neighbours on one
            pipeline stage together, ``"group_N"``: at most N of them.

    Raises:
        SMPUserError: an unknown strategy, or a strategy for something that has no sequence of children.

    Example:
        >>> layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        >>> smp.set_activation_checkpointing(layers, strategy="group_4")
    """
    how = Strategy.parse(strategy)
    if not isinstance(module, nn.Module):
        raise SMPUserError(
            f"smp.set_activation_checkpointing got {module!r}, {kind_of(module)}; pass a module of the model, such as "
            "model.module.layers",
            code="SMP309",
        )
    if sessions.is_initialized() and any(module is model for model in sessions.current_session().models):
        inner = module.module
        module = inner if isinstance(inner, nn.Module) else module
    if isinstance(module, nn.Sequential):
        check_sequential(module, how)
        if how.most == 1:
            for child in module:
                mark(child, preserve_rng_state)
        else:
            _mark(module, _GroupedForward(module, how, preserve_rng_state))
        return
    if how.name != "each" or pack_args_as_tuple:
        given = f"strategy={strategy!r}" if how.name != "each" else "pack_args_as_tuple=True"
        raise SMPUserError(
            f"{given} was given for {kind_of(module)}, but only an nn.Sequential tells in which order its children are "
            "called; leave it out, or make the layers an nn.Sequential",
            code="SMP309",
        )
    for part in module if isinstance(module, nn.ModuleList) else [module]:
        mark(part, preserve_rng_state)


class _CheckpointedCall:
    """Stands in for a module's call, hooks included."""

    is_elsewhere = False

    def __init__(self, module: nn.Module, preserve_rng_state: bool) -> None:
        self.module = module
        self.preserve_rng_state = preserve_rng_state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        call = module_calls.own_call(module)
        if is_off() or (checkpoints_itself(module) and not module.training):
            return call(*args, **kwargs)
        here = Activations.here()
        if here.placement is not None and here.placement.stage_of(module) is None:
            return call(*args, **kwargs)
        label = type(module).__name__
        return run_region(call, args, kwargs, here, preserve_rng_state=self.preserve_rng_state, label=label)

    def install(self) -> None:
        """Take the place of the module's own call, unless the call goes to another stage."""
        let_pass(self.module)
        module_calls.answer(self.module, self)

    def on(self, module: nn.Module) -> _CheckpointedCall:
        """Return a call with the same settings for another module."""
        return _CheckpointedCall(module, self.preserve_rng_state)


class _GroupedForward:
    """A replacement for the forward of an ``nn.Sequential`` with children that are checkpointed in groups."""

    def __init__(self, module: nn.Sequential, strategy: Strategy, preserve_rng_state: bool) -> None:
        self.module = module
        self.strategy = strategy
        self.preserve_rng_state = preserve_rng_state

    def __call__(self, value: Any) -> Any:
        return run_sequential(self.module, value, self.strategy, self.preserve_rng_state)

    def install(self) -> None:
        """Take the place of the module's own forward."""
        for child in self.module:
            let_pass(child)
        self.module.__dict__["forward"] = self

    def on(self, module: nn.Module) -> _GroupedForward:
        """Return a forward with the same settings for another module."""
        return _GroupedForward(check_sequential(module, self.strategy), self.strategy, self.preserve_rng_state)


_Marking = _CheckpointedCall | _GroupedForward


def _mark(module: nn.Module, marking: _Marking) -> None:
    unmark(module)
    module.__dict__[_MARK] = marking
    marking.install()


def unmark(module: nn.Module) -> None:
    """Stop checkpointing a module."""
    marking = module.__dict__.pop(_MARK, None)
    forward = module.__dict__.get("forward")
    if isinstance(marking, _CheckpointedCall):
        module_calls.answer_itself(module, marking)
    elif marking is not None and forward is marking:
        del module.__dict__["forward"]


def mark(module: nn.Module, preserve_rng_state: bool = True) -> None:
    """Checkpoint one module, whatever its type."""
    _mark(module, _CheckpointedCall(module, preserve_rng_state))


def is_marked(module: nn.Module) -> bool:
    """Return whether a module is checkpointed."""
    return _MARK in module.__dict__


def marked_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that must each lie on one stage.

    These are checkpointed modules, and the children of sequences that are checkpointed in groups.
    """
    for module in model.modules():
        marking = module.__dict__.get(_MARK)
        if isinstance(marking, _GroupedForward):
            yield from module.children()
        elif marking is not None:
            yield module


def recomputed_parts(model: nn.Module) -> dict[str, bool]:
    """Return the paths of the modules that backward computes again, and whether each keeps its inputs.

    No path lies in another one.
    """
    found: dict[str, bool] = {}
    inside: set[int] = set()
    for path, module in model.named_modules():
        marking = module.__dict__.get(_MARK)
        if marking is None or id(module) in inside:
            continue
        inside.update(id(part) for part in module.modules())
        if isinstance(marking, _GroupedForward):
            for index, (name, _) in enumerate(module.named_children()):
                first = index % marking.strategy.most == 0  # of its region
                found[f"{path}.{name}".lstrip(".")] = first
        else:
            found[path] = True
    return found


def find_marks(model: nn.Module) -> dict[str, _Marking]:
    """Return the settings of a model's checkpointed modules, by path."""
    return {path: module.__dict__[_MARK] for path, module in model.named_modules() if is_marked(module)}


def carry_over(before: dict[str, _Marking], model: nn.Module) -> None:
    """Checkpoint the modules that have replaced checkpointed ones.

    Args:
        before: from :func:`find_marks`, before modules were replaced.
        model: the model now.
    """
    now = dict(model.named_modules())
    lost = []
    for path, marking in before.items():
        module = now.get(path)
        if module is None:
            lost.append(path)
        elif module is not marking.module:
            _mark(module, marking.on(module))
    if lost:
        logger.warning(
            "the checkpointing of %s is lost, since the modules around it were replaced by distributed ones; call "
            "smp.set_activation_checkpointing on the layers of the wrapped model, after smp.DistributedModel",
            ", ".join(repr(path) for path in lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else ""),
        )


# -- models that checkpoint themselves, as those of Transformers after gradient_checkpointing_enable() -----------------
# Such a layer wraps its own call on the caller's side, and the caller may be on another stage than the layer.
# Here the layer still prepares its arguments for a checkpointed call (it drops caches), but the call itself passes.
# The layer is checkpointed on the stage that runs it.


def checkpoints_itself(module: nn.Module) -> bool:
    """Return whether a module itself acts on ``gradient_checkpointing``.

    It does so in its call or, in Transformers 5, around its forward.
    """
    kind = type(module)
    return hasattr(kind, FLAG) and (kind.__call__ is not nn.Module.__call__ or hasattr(kind.forward, "__wrapped__"))


def let_pass(module: nn.Module) -> None:
    """Let a layer prepare for checkpointing, but not checkpoint itself, since smp checkpoints it."""
    if checkpoints_itself(module):
        module.__dict__[FLAG] = True
        module.__dict__[FUNCTION] = pass_through


def pass_through(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the given function, in place of the layer's checkpointing function."""
    # The layer has dropped caches among keyword arguments; a cache would be written a second time in backward.
    return function(*(None if is_cache(value) else value for value in args), **kwargs)


def _checkpoints_by(module: nn.Module, function: Any) -> bool:
    """Return whether a module is switched on, with a checkpoint function that is not this library's."""
    is_foreign = function is not None and function is not pass_through
    if not is_foreign or isinstance(function, _Ours):
        return False
    return bool(getattr(module, FLAG, False))


def take_over(model: nn.Module) -> None:
    """Checkpoint modules here that checkpoint themselves; on every rank, so that callers and owners agree."""
    for module in model.modules():
        has_switch = hasattr(type(module), _SWITCH)
        if has_switch and _SWITCH not in module.__dict__:
            module.__dict__[_SWITCH] = _Switch(module)
        function = module.__dict__.get(FUNCTION)
        # Transformers' switch may be turned off between two steps.
        is_switched_off = function is not None and not getattr(module, FLAG)
        if is_switched_off and is_marked(module) and checkpoints_itself(module):
            unmark(module)
        if not _checkpoints_by(module, function):
            continue
        preserve = preserves_rng_state(function)
        if checkpoints_itself(module):
            mark(module, preserve)
        else:
            module.__dict__[FUNCTION] = _Ours(preserve)


class _Switch:
    """Stands in for a model's method that switches checkpointing on and off: inside a step it stays as it is.

    TRL switches it off around the forward pass of a reference, which keeps nothing anyway, and on again behind it. That is
    inside a step, on one rank, while other microbatches are between their forward and backward passes: layers would
    be checkpointed by PyTorch when backward runs them again.
    """

    def __init__(self, module: nn.Module) -> None:
        # Transformers asks for its signature.
        self.__wrapped__ = getattr(type(module), _SWITCH).__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not sessions.is_initialized() or sessions.current_session().ranks.step.microbatch is None:
            self.__wrapped__(*args, **kwargs)


def preserves_rng_state(function: Any) -> bool:
    """Return the ``preserve_rng_state`` of a model's checkpointing function; True if it is not set."""
    if not isinstance(function, functools.partial):
        return True
    if getattr(function.func, "__module__", "").startswith(
        "transformers."
    ):  # not PyTorch's, but one that also moves tensors
        say_offloading_is_ours()
    return bool(function.keywords.get("preserve_rng_state", True))


@functools.cache  # once
def say_offloading_is_ours() -> None:
    """Warn a script that asked Transformers to offload activations that smp checkpoints these layers."""
    logger.warning(
        "activation_checkpointing_enable(offload=True) changes nothing here, since these layers are checkpointed by smp: set "
        '"offload_activations": True in the parameters of the distribution, which moves their inputs while others compute'
    )


class _Ours:
    """The checkpointing function of a model that calls it around the calls of its layers."""

    def __init__(self, preserve_rng_state: bool) -> None:
        self._preserve = preserve_rng_state

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for ignored in ("use_reentrant", "preserve_rng_state"):
            kwargs.pop(ignored, None)
        owner = getattr(function, "__self__", None)
        is_call = getattr(function, "__name__", "") in ("__call__", "forward", "_call_impl", "_wrapped_call_impl")
        module = owner if is_call and isinstance(owner, nn.Module) else function
        return checkpoint(module, *args, preserve_rng_state=self._preserve, **kwargs)


def begin_step(module: nn.Module, placement: StagedRegions | None) -> None:
    """Begin a step of a model; every rank of a pipeline calls it.

    Args:
        module: the wrapped module.
        placement: of its regions on the stages of a pipeline; None without one.

    Raises:
        SMPUserError: a checkpointed module is split over stages that were set by hand.
    """
    here = Activations.here()
    if placement is not None:
        here.placement = placement
    has_offloader = here.offloader is not None
    if placement is not None or has_offloader:
        take_over(module)
    if here.placement is not None:
        here.placement.check(module)
    offloads = has_offloader and any(map(is_marked, module.modules()))
    here.step_begins(offloads)
