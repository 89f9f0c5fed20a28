"""The optimizer's state in a full checkpoint: numbered as in one process, with the parameters' names.

Numbers follow the order of ``model.parameters()``. If tensor parallelism replaces a model by its own, this
order changes, and so do names and shapes. The names show which values belong together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from smp_runtime.checkpoint.files.manifest import TensorRecord
from smp_runtime.checkpoint.files.name_translation import TranslatedTensor
from smp_runtime.errors import CheckpointError, SMPUserError
from smp_runtime.optim.whole_state import HALF_KEY, NAMES_KEY, does_clash

if TYPE_CHECKING:
    from smp_runtime.job.session import Session
    from smp_runtime.model.distributed_model import DistributedModel
    from smp_runtime.optim.distributed_optimizer import DistributedOptimizer


class NamedParameter(NamedTuple):
    """A parameter of the optimizer, as one process has it."""

    name: str
    made: TranslatedTensor  # of this model's parameters


@dataclass(frozen=True)
class NamedState:
    """A state of an optimizer that is read by names.

    Attributes:
        names: of the parameters, by group.
        state: with ``"state"``, ``"param_groups"`` and perhaps the float32 weights.
    """

    names: list[list[str]]
    state: Mapping[str, Any]

    def by_name(self) -> dict[str, dict[str, Any]]:
        """Return the state of each parameter that has any."""
        numbers = [number for group in self.state["param_groups"] for number in group["params"]]
        flat = itertools.chain.from_iterable(self.names)
        states = self.state["state"]
        return {name: states[number] for name, number in zip(flat, numbers, strict=True) if number in states}


# -- saving ------------------------------------------------------------------------------------------------------------


def groups_here(model: DistributedModel, optimizer: DistributedOptimizer) -> list[list[str]] | None:
    """Return the names of the optimizer's parameters in its order, by group.

    None if some are no parameters of the model.
    """
    try:
        return [
            [model.registry.record_of(parameter).name for parameter in dict.fromkeys(group)]
            for group in optimizer.original_groups()
        ]
    except SMPUserError:
        return None


def groups_of_one_process(
    session: Session, model: DistributedModel, here: Sequence[Sequence[str]]
) -> list[list[NamedParameter]] | None:
    """Return the optimizer's parameters as one process has them, in the model's order.

    None if they are the same as in this job.

    Args:
        here: from :func:`groups_here`.
    """
    ours = _leaves_by_name(model)
    theirs = session.module_manager.translated(ours, model.module)
    if all(ours.get(name) is made for name, made in theirs.items()):
        return None
    owner = _number_of_each(here)
    place = _number_of_each(model.blueprint.parameter_names)
    groups: list[list[NamedParameter]] = [[] for _ in here]
    seen: set[int] = set()
    for name, made in sorted(theirs.items(), key=lambda item: place.get(item[0], len(place))):
        index = next((owner[source] for source in made.sources if source in owner), None)
        is_new = id(made) not in seen  # a tied parameter has several names, but is in the optimizer once
        if is_new and index is not None:
            groups[index].append(NamedParameter(name, made))
        seen.add(id(made))
    return groups


def _leaves_by_name(model: DistributedModel) -> dict[str, TranslatedTensor]:
    leaves: dict[str, TranslatedTensor] = {}
    for record in model.registry:
        dtype = str(record.parameter.dtype).removeprefix("torch.")
        leaf = TranslatedTensor.leaf(record.name, TensorRecord(tuple(record.shape), dtype, record.aliases))
        leaves |= dict.fromkeys(record.names, leaf)
    return leaves


def _number_of_each(groups: Iterable[Iterable[str]]) -> dict[str, int]:
    """Return the number of each name's group."""
    numbers: dict[str, int] = {}
    for number, names in enumerate(groups):
        numbers |= dict.fromkeys(names, number)
    return numbers


def with_names(
    session: Session,
    model: DistributedModel,
    optimizer: DistributedOptimizer,
    state: Mapping[str, Any],
    *,
    translates: bool,
) -> dict[str, Any]:
    """Add the parameters' names to a full state, and number and shape it as in one process.

    Args:
        state: from ``optimizer.full_state_dict()``. On a rank that only took part it is empty, and stays so.
        translates: False keeps this job's parameters.
    """
    here = groups_here(model, optimizer)
    if here is None or not state:
        return dict(state)
    groups = groups_of_one_process(session, model, here) if translates else None
    if groups is None:
        return {**state, NAMES_KEY: here}
    shapes = {record.name: tuple(record.shape) for record in model.registry}
    ours = NamedState(here, state).by_name()
    numbers = itertools.count()
    states: dict[int, dict[str, Any]] = {}
    settings = []
    for former, named in zip(state["param_groups"], groups, strict=True):
        group = {**former, "params": [next(numbers) for _ in named]}
        if "param_names" in group:
            group["param_names"] = [each.name for each in named]
        settings.append(group)
        states |= {
            number: values
            for number, each in zip(group["params"], named, strict=True)
            if (values := _values_of(each.made, ours, shapes))
        }
    made = {**state, "state": states, "param_groups": settings}
    made[NAMES_KEY] = [[each.name for each in named] for named in groups]
    half = state.get(HALF_KEY)
    if half:
        masters = half["masters"]
        flat = [each for named in groups for each in named if all(name in masters for name in each.made.sources)]
        made[HALF_KEY] = {**half, "masters": {each.name: each.made.value(masters.__getitem__) for each in flat}}
    return made


def _values_of(
    made: TranslatedTensor, states: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Return a parameter's state, built from those of its source parameters."""
    values: dict[str, Any] = {}
    for key, first in states.get(made.sources[0], {}).items():
        parts = {name: states.get(name, {}).get(key) for name in made.sources}
        if all(_has_shape(part, shapes[name]) for name, part in parts.items()):
            values[key] = made.value(parts.__getitem__).contiguous()  # type: ignore[arg-type]
        else:  # it belongs to the whole of a parameter, such as a step counter
            values[key] = first
    return values


def _has_shape(value: Any, shape: tuple[int, ...]) -> bool:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return False
    return tuple(value.shape) == shape


# -- loading -----------------------------------------------------------------------------------------------------------


def fit_state(
    session: Session,
    model: DistributedModel,
    optimizer: DistributedOptimizer,
    state: dict[str, Any],
    title: str,
) -> dict[str, Any] | NamedState:
    """Return a saved state with the numbers of ``optimizer``, or a state to read by names if the parameters differ.

    Args:
        title: of the state, for messages.

    Raises:
        CheckpointError: it is of other parameters, or of other groups.
    """
    counts = [len(group["params"]) for group in state["param_groups"]]
    here = groups_here(model, optimizer)
    if here is None:  # of several models: numbers are all there is
        _refuse_other_counts(title, counts, [len(group) for group in optimizer.original_groups()])
        return state
    shapes: dict[str, tuple[int, ...]] = {}
    for record in model.registry:
        shapes |= dict.fromkeys(record.names, tuple(record.shape))
    names = names_in(state)
    if names is not None:
        known = _first_names(model, names)
        if shapes.keys() >= set(itertools.chain.from_iterable(known)):
            return _renumbered(NamedState(known, state), here, shapes, title)
        return NamedState(names, state)
    one_process = groups_of_one_process(session, model, here)
    if one_process is not None:
        named = _named_by_one_process(state, one_process, counts)
        if named is not None:
            return named
    _refuse_other_counts(title, counts, [len(group) for group in here])
    _refuse_other_shapes(NamedState(here, state), shapes, title)
    return state


def _first_names(model: DistributedModel, names: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return a state's names with the model's first name for each parameter that it knows."""
    first_of: dict[str, str] = {}
    for record in model.registry:
        first_of |= dict.fromkeys(record.names, record.name)
    return [[first_of.get(name, name) for name in group] for group in names]


def _named_by_one_process(
    state: dict[str, Any], groups: Sequence[Sequence[NamedParameter]], counts: Sequence[int]
) -> NamedState | None:
    """Return a state without names with those that one process would have; None if its tensors do not fit them."""
    names = [[parameter.name for parameter in group] for group in groups]
    found = [len(group) for group in names]
    if found != counts:
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    for parameter in itertools.chain.from_iterable(groups):
        shapes[parameter.name] = tuple(parameter.made.shape)
    named = NamedState(names, state)
    return None if _clash(named, shapes) else named


def names_in(state: Mapping[str, Any]) -> list[list[str]] | None:
    """Return the names of a state's parameters by group; None if it does not have them all."""
    names = state.get(NAMES_KEY)
    # Another program may have written anything under this key.
    if not isinstance(names, list):
        return None
    for group in names:
        if not isinstance(group, list):
            return None
        are_names = all(isinstance(name, str) for name in group)
        if not are_names:
            return None
    counts = [len(group["params"]) for group in state["param_groups"]]
    found = [len(group) for group in names]
    if found != counts:
        return None
    return names


def _renumbered(
    saved: NamedState, here: Sequence[Sequence[str]], shapes: Mapping[str, tuple[int, ...]], title: str
) -> dict[str, Any]:
    """Return the state of ``saved`` with this optimizer's numbers."""
    _refuse_other_counts(title, [len(group) for group in saved.names], [len(group) for group in here])
    for index, (theirs, ours) in enumerate(zip(saved.names, here, strict=True)):
        if others := sorted(set(theirs) ^ set(ours)):
            raise CheckpointError(
                f"the optimizer state in {title} has other parameters in group {index} than the optimizer: "
                f"{', '.join(others[:3])}; build it from the same parameter groups as when it was saved, or pass "
                "load_optimizer=False"
            )
    _refuse_other_shapes(saved, shapes, title)
    if saved.names == list(here):
        return dict(saved.state)
    values = saved.by_name()
    numbers = {name: number for number, name in enumerate(itertools.chain.from_iterable(here))}
    groups = [
        {**group, "params": [numbers[name] for name in names]}
        for group, names in zip(saved.state["param_groups"], here, strict=True)
    ]
    return {
        **saved.state,
        "state": {numbers[name]: found for name, found in values.items()},
        "param_groups": groups,
    }


def _refuse_other_counts(title: str, there: Sequence[int], here: Sequence[int]) -> None:
    if list(here) != list(there):
        raise CheckpointError(
            f"the optimizer state in {title} has {len(there)} groups with {list(there)} parameters, but the optimizer has "
            f"{list(here)}; build it from the same parameter groups as when it was saved, or pass load_optimizer=False"
        )


def _refuse_other_shapes(saved: NamedState, shapes: Mapping[str, tuple[int, ...]], title: str) -> None:
    if clash := _clash(saved, shapes):
        raise CheckpointError(
            f"the optimizer state in {title} is of parameters of other shapes: {clash}; resume a partial checkpoint, which knows "
            "the names of its parameters, or pass load_optimizer=False"
        )


def _clash(saved: NamedState, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Describe a value of the state that cannot belong to its parameter; empty if there is none."""
    for name, values in saved.by_name().items():
        shape = shapes[name]
        for key, value in values.items():
            if does_clash(value, shape):
                return f"{key} of {name} is {list(value.shape)}, and the parameter {list(shape)}"
    return ""
