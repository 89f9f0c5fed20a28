"""Attributes that a distributed module takes over from the original: weights, types, freezing, checkpointing."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from smp_runtime.activations.marking import FLAG, FUNCTION, checkpoints_itself, is_marked, preserves_rng_state
from smp_runtime.module_conversion.parameter_layout import slices_by_name
from smp_runtime.nn.transformer import DistributedTransformer
from smp_runtime.parameters.precision import Precision
from smp_runtime.tensors.nested import leaves_of
from smp_runtime.tensors.torch_private import storage_key

if TYPE_CHECKING:
    from smp_config import ModelParallelParameters
    from smp_runtime.job.module_manager import Translate
    from smp_runtime.parameters.registry import TensorSlice

logger = logging.getLogger("smp")

#: Attributes of the replaced module that scripts read.
_KEPT_ATTRIBUTES = ("config", "generation_config")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Type that marks frozen parameters in a state without values; no parameter of a model has it.
_FROZEN = torch.complex128
_HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class _NothingIsEqual(TorchFunctionMode):
    """A mode in which no tensors are equal, since tensors without values cannot be compared.

    Parameters with a name each are then not treated as tied.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.equal:
            return False
        return func(*args, **(kwargs or {}))


def parameter_type(original: nn.Module, options: ModelParallelParameters) -> torch.dtype | None:
    """Return the floating point type for the parameters of a module that replaces ``original``.

    None leaves it to the distributed modules. This is so if the original has several types, under ``fp16_params``,
    and under ``fp16`` and ``bf16``. There the new weights become the float32 master weights and would be rounded.
    """
    if options.fp16_params or Precision.of(options).is_half:
        return None
    types = {parameter.dtype for parameter in original.parameters() if parameter.is_floating_point()}
    return types.pop() if len(types) == 1 else None


@torch.no_grad()
def set_parameter_type(made: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters of a distributed module that were made in another type."""
    for parameter in made.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def state_of(original: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights and saved buffers of a module that is to be replaced, tied ones once."""
    seen: set[int] = set()
    state: dict[str, torch.Tensor] = {}
    for name, value in original.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and id(value) not in seen:
            seen.add(id(value))
            state[name] = value
    return state


class CarriedAttributes:
    """The weights of a replaced module on their way into its distributed form.

    Args:
        state: of the original, see :func:`state_of`.
        to_ours: how it is renamed and laid out; None if it is kept as it is.

    Attributes:
        lost: weights that the distributed form has no place for, with the reason.
        missing: places that no weight goes into.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], made: nn.Module, to_ours: Translate | None) -> None:
        self._made = made.state_dict(keep_vars=True)
        self._slices = slices_by_name(made)
        # Views of the original's tensors, so that no weight is in memory twice. Untied weights are not taken as tied.
        with torch.no_grad(), _NothingIsEqual():
            self._ours = dict(state if to_ours is None else to_ours(state))
        misfits = [self._misfit(name, value) for name, value in self._ours.items()]
        self.lost = [why for why in misfits if why]
        #: By the id of each of the original's tensors, those that have its elements now.
        self.successors = self._find_successors(state)
        self.missing = [name for name in self._made if name not in self._ours]

    def _find_successors(self, state: Mapping[str, torch.Tensor]) -> dict[int, list[nn.Parameter]]:
        # By storage, since a translated tensor is a view of the original: another object with the same memory.
        sources = {storage_key(value): value for value in state.values()}
        found: dict[int, list[nn.Parameter]] = {}
        for name, value in self._ours.items():
            source = sources.get(storage_key(value))
            target = self._made.get(name)
            if source is not None and isinstance(target, nn.Parameter):
                found.setdefault(id(source), []).append(target)
        return found

    def _misfit(self, name: str, value: torch.Tensor) -> str | None:
        target = self._made.get(name)
        if target is None:
            return f"{name} has no place in it"
        shape = tuple(target.shape)
        if name in self._slices:
            shape = tuple(self._slices[name].shape)  # of the whole: the parameter has this rank's part only
        if tuple(value.shape) == shape:
            return None
        return f"{name} is {list(value.shape)}, not {list(shape)}"

    @torch.no_grad()
    def hand_over(self) -> set[int]:
        """Copy this rank's part of the weights into the distributed form; return the ids of the parameters written."""
        for name, value in self._ours.items():
            where, target = self._slices.get(name), self._made[name]
            target.copy_(value if where is None else where.cut(value))
        return {id(self._made[name]) for name in self._ours}


def inherit(original: nn.Module, made: nn.Module, to_ours: Translate | None, title: str, *, warns: bool) -> None:
    """Set on ``made`` what scripts may have set on ``original``, and warn about what cannot be set.

    Args:
        to_ours: how parameters are renamed; None if they keep their names.
        title: of the original, for warnings.
        warns: whether this rank logs them.
    """
    made.train(original.training)
    for attribute in _KEPT_ATTRIBUTES:
        if hasattr(original, attribute) and not hasattr(made, attribute):
            setattr(made, attribute, getattr(original, attribute))
    _inherit_module_attributes(original, made)
    for warning in (
        *_inherit_freezing(original, made, to_ours),
        *_inherit_checkpointing(original, made),
        *_lost_hooks(original),
    ):
        if warns:
            logger.warning("%s is distributed, but %s", title, warning)


def inherit_parameter_attributes(
    original: nn.Module,
    made: nn.Module,
    successors: Mapping[int, list[nn.Parameter]],
    slices: Mapping[str, TensorSlice],
) -> list[str]:
    """Set what a script has set on parameters of ``original`` on those that take their places.

    Args:
        successors: by the ``id`` of each parameter of the original, those that have its elements; one of the same name otherwise.
        slices: of the parameters of ``made`` that are split, by name.

    Returns:
        Attributes that are lost, since one parameter takes the place of several on which they differ, or none does.
    """
    lost: dict[str, None] = {}
    found = dict(made.named_parameters(remove_duplicate=False))
    names = {id(parameter): name for name, parameter in found.items()}
    values: dict[tuple[int, str], Any] = {}
    for name, parameter in original.named_parameters():
        same = [found[name]] if name in found else []
        theirs = [p for p in successors.get(id(parameter)) or same if p is not parameter]
        for attribute, value in vars(parameter).items():
            if not theirs:
                lost[f"{name}.{attribute}"] = None
            for successor in theirs:
                where = slices.get(names.get(id(successor), ""))
                if isinstance(value, torch.Tensor) and where is not None and tuple(value.shape) == where.shape:
                    value = where.cut(value)  # a mask, or a rate of each element
                known = values.setdefault((id(successor), attribute), value)
                if known is not value and not _are_equal(known, value):
                    lost[f"{name}.{attribute}"] = None
                    continue
                vars(successor)[attribute] = value
    return list(lost)


def _are_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError, TypeError):
        return False  # for example of two tensors with several elements


def _inherit_module_attributes(original: nn.Module, made: nn.Module) -> None:
    """Copy attributes that a script or a parent has set on a module, or that only the original's class has."""
    for name, value in vars(original).items():
        is_own = name.startswith("_") or hasattr(made, name)
        if not is_own and not callable(value) and not _holds_weights(value):
            setattr(made, name, value)


def _holds_weights(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor | nn.Module) for leaf in leaves_of(value))


def translated_places(state: Mapping[str, Any], to_ours: Translate | None) -> Mapping[str, Any]:
    """Return a state without values by the names of a distributed module.

    Args:
        to_ours: how parameters are renamed and laid out; None if they keep their names.
    """
    if to_ours is None:
        return state
    with torch.no_grad(), _NothingIsEqual():
        return to_ours(state)


def _inherit_freezing(original: nn.Module, made: nn.Module, to_ours: Translate | None) -> Iterator[str]:
    parameters = dict(original.named_parameters())
    frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
    if frozen and len(frozen) == len(parameters):
        # Those too that only the new module has.
        made.requires_grad_(False)
        return
    found = dict(made.named_parameters())
    # A state without values shows the new place of each parameter. Frozen parameters have a type of their own in it.
    places = {}
    for name, parameter in parameters.items():
        dtype = _FROZEN if name in frozen else torch.float32
        places[name] = torch.empty(parameter.shape, device="meta", dtype=dtype)
    state = translated_places(places, to_ours)
    ours = [name for name, value in state.items() if value.dtype is _FROZEN]
    lost = [repr(name) for name in ours if name not in found]
    for name in ours:
        if name in found:
            found[name].requires_grad_(False)
    if lost:
        yield (
            f"it has no parameter for {list_names(lost)}, which had requires_grad=False: set requires_grad on the parameters of "
            "the distributed module, before smp.DistributedOptimizer is made; by name, in model.named_parameters()"
        )


def _inherit_checkpointing(original: nn.Module, made: nn.Module) -> Iterator[str]:
    asked = [part for part in original.modules() if part.__dict__.get(FLAG) and not is_marked(part)]
    if not asked:
        return
    preserve = preserves_rng_state(asked[0].__dict__.get(FUNCTION))
    transformers = [part for part in made.modules() if isinstance(part, DistributedTransformer)]
    every = _checkpoint_interval(original, asked)
    for transformer in transformers:
        transformer.checkpoint_layers(preserve_rng_state=preserve, every=every)
    if not transformers:
        yield (
            "its gradient checkpointing is lost, since it has no sequence of layers: call smp.set_activation_checkpointing "
            "on parts of the wrapped model, after smp.DistributedModel"
        )


def _lost_hooks(original: nn.Module) -> Iterator[str]:
    having = [
        name or type(original).__name__ for name, part in original.named_modules() if _any_of(part.__dict__, _HOOKS)
    ]
    having += [
        name
        for name, parameter in original.named_parameters()
        if any(getattr(parameter, kind, None) for kind in _HOOKS_OF_PARAMETERS)
    ]
    if having:
        names = list_names([repr(name) for name in having])
        yield (
            f"hooks were registered on {names}, which it replaces, and are not called: register them on modules or parameters "
            "of the wrapped model, after smp.DistributedModel"
        )


def _checkpoint_interval(original: nn.Module, asked: Sequence[nn.Module]) -> int:
    """Return one checkpointed layer in how many: Transformers 5 may leave layers between them that keep everything."""
    is_asked = [part in asked for part in original.modules() if checkpoints_itself(part)]
    if True in is_asked[1:]:
        return is_asked[1:].index(True) + 1
    return len(is_asked) or 1


def _any_of(attributes: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    for name in names:
        hooks = attributes.get(name) or {}
        for hook in hooks.values():
            # Transformers' own, which lets gradients pass through frozen embeddings to checkpointed layers: ours need none.
            is_transformers_own = "make_inputs_require_grads" in getattr(hook, "__qualname__", "")
            if not is_transformers_own:
                return True
    return False


def list_names(facts: list[str]) -> str:
    """Return the first of some names or facts, for a message."""
    return ", ".join(facts[:3]) + (f" and {len(facts) - 3} more" if len(facts) > 3 else "")
