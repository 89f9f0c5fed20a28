"""Changes on a module that is split in place, besides its linear maps: numbers of heads, and shared parameters."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smp_config.errors import kind_of
from smp_runtime.errors import SMPUserError
from smp_runtime.nn.split_in_place.linear import PlannedLinear
from smp_runtime.tensor_parallel import collectives
from smp_runtime.tensor_parallel.block_entry import BlockEntry
from smp_runtime.tensor_parallel.deferred import SlicedCalls
from smp_runtime.tensor_parallel.local_views import LocalViews
from smp_runtime.tensor_parallel.norm_statistics import SharedStatistics
from smp_runtime.tensor_parallel.partial_region import OwnExperts, PartialRegion

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.nn.split_in_place.linear import LinearSplit
    from smp_runtime.nn.split_in_place.tables import Tables
    from smp_runtime.tensor_parallel.deferred import DeferredSlice
    from smp_runtime.tensor_parallel.group import TensorGroup

#: Attribute of a split module with the numbers that it had as a whole.
_WHOLE_NUMBERS = "_smp_whole_numbers"

#: Path of a module, attribute, and its value on one rank.
Number = tuple[str, str, int]


@dataclass(frozen=True)
class BlockSplit:
    """The way in which a block is split.

    Attributes:
        leaves: of its linear maps, by path.
        numbers: heads and features of one rank, as (path of the module, attribute, value); in a module's
            configuration, the attribute is ``config.num_heads``, for example.
        regions: modules in which all gradients are partial: their first result is summed, by path.
        tables: modules with parameters that are split over the ranks, by path: those of many experts, of heads, of
            norms.
        summed: parameters that each rank has whole and uses on its own features, by name; their gradients are
            summed.
        replicated: linear maps that stay whole; each rank uses their results in its own way.
        views: modules that make views by the width of their input: these are of this rank's features.
        arguments: tensors; the block takes this rank's slice of each.
        results: tensors; the block returns this rank's slice of each, which is gathered when it is used.
    """

    leaves: Mapping[str, LinearSplit]
    numbers: tuple[Number, ...] = ()
    summed: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    tables: Mapping[str, Tables] = field(default_factory=dict)
    replicated: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    arguments: tuple[DeferredSlice, ...] = ()
    results: tuple[DeferredSlice, ...] = ()


def require_all(block: nn.Module, split: BlockSplit, made: Container[int]) -> None:
    """Check that all linear maps of a split were replaced: ``made`` has the ``id`` of each replaced one.

    Raises:
        SMPUserError: one was not, and the rest of the block needs it.
    """
    for path in (*split.leaves, *split.tables):
        if id(block.get_submodule(path)) not in made:
            raise SMPUserError(
                f"{path} of {kind_of(block)} that is split in place cannot be replaced (see the warning before this), and "
                "the rest of it counts on that: take the block out by smp.set_tensor_parallelism(module, False), or create all of "
                "it in one context",
                code="SMP307",
            )


def adapt(block: nn.Module, split: BlockSplit, group: TensorGroup) -> None:
    """Scale a block's numbers, let shared parameters be summed, and watch its calls.

    Its linear maps must have been replaced.
    """
    prepare(block, split, group)
    BlockEntry(group).watch(block)
    for shared in {
        id(part.shared): part.shared for part in block.modules() if isinstance(part, PlannedLinear)
    }.values():
        block.register_forward_hook(shared.clear_behind, always_call=True)


def prepare(block: nn.Module, split: BlockSplit, group: TensorGroup) -> None:
    """Scale a block's numbers and let shared parameters be summed; calls must have the group's batch already."""
    for path, attribute, value in split.numbers:
        part = block.get_submodule(path)
        holder, _, name = attribute.rpartition(".")
        whole = part.__dict__.setdefault(_WHOLE_NUMBERS, {})
        if not holder:
            whole.setdefault(name, getattr(part, name))
            setattr(part, name, value)
        else:  # others have this configuration too
            if holder not in whole:
                whole[holder] = getattr(part, holder)
                setattr(part, holder, copy.copy(whole[holder]))
            setattr(getattr(part, holder), name, value)
    divided = {f"{path}.{name}".lstrip(".") for path, tables in split.tables.items() for name in tables.divided}
    # Sorted, so that hooks, and with them their collectives, come in one order on all ranks.
    for name in sorted({*split.summed, *divided}):
        path, _, parameter = name.rpartition(".")
        hooks = _OnOwnFeatures(parameter, group, is_summed=name in split.summed, is_divided=name in divided)
        hooks.watch(block.get_submodule(path))
    for path, tables in split.tables.items():
        _watch_tables(block.get_submodule(path), tables, group)
    for path in split.regions:
        PartialRegion(group).watch(block.get_submodule(path))
    for path in split.replicated:
        block.get_submodule(path).register_forward_hook(lambda _, args, y: collectives.use_replicated(y, group))
    for path in split.views:
        LocalViews(group).watch(block.get_submodule(path))
    for path in {part.module for part in (*split.arguments, *split.results)}:
        arguments = [part for part in split.arguments if part.module == path]
        results = [part for part in split.results if part.module == path]
        SlicedCalls(group, arguments, results).watch(block.get_submodule(path))


def _watch_tables(part: nn.Module, tables: Tables, group: TensorGroup) -> None:
    if tables.is_norm:
        SharedStatistics(group).watch(part)
    if tables.is_spread:
        part.register_forward_pre_hook(OwnExperts(group, tables.experts).enter, with_kwargs=True)


def number_of(block: nn.Module, path: str, attribute: str) -> Any:
    """Return the value of a :data:`Number` on a module that is not split."""
    found: Any = block.get_submodule(path)
    for name in attribute.split("."):
        found = getattr(found, name)
    return found


def become_whole(module: nn.Module) -> None:
    """Restore the whole numbers on a copy of a module that is not split any more."""
    for attribute, whole in module.__dict__.pop(_WHOLE_NUMBERS, {}).items():
        setattr(module, attribute, whole)


#: Before the name of a parameter: what a module's own dictionary has of it, while a value for the pass stands in its place.
_FORMER = "_smp_former_"


class _OnOwnFeatures:
    """Hooks that pass a module's parameter to its forward pass so that its gradients are summed over the group.

    If results are summed, every rank adds only a share of the parameter.

    The module's own dictionary takes precedence over its parameters. While the pass runs, the name there refers to
    the value that autograd sums behind.
    """

    def __init__(self, name: str, group: TensorGroup, *, is_summed: bool, is_divided: bool) -> None:
        self._name, self._group, self._is_summed, self._is_divided = name, group, is_summed, is_divided

    def watch(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.before)
        # After an error too: the value of this pass must not stay in the parameter's place.
        module.register_forward_hook(self.behind, always_call=True)

    def before(self, module: nn.Module, args: Any) -> None:
        own = module.__dict__
        # FSDP puts a parameter's gathered values there, and takes the parameter away while it recomputes.
        parameter = own[_FORMER + self._name] = own.get(self._name)
        if parameter is None:
            parameter = module._parameters[self._name]
        value = parameter
        if self._is_summed:
            value = collectives.use_shared(self._group, parameter)[0]
        if self._is_divided and value is not None:
            value = value / self._group.size
        own[self._name] = value

    def behind(self, module: nn.Module, args: Any, result: Any) -> None:
        own = module.__dict__
        former = own.pop(_FORMER + self._name, None)
        own.pop(self._name, None)
        if former is not None:
            own[self._name] = former
