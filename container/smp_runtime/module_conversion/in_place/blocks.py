"""The blocks of a model that may be split in place: those of a plan, and those that one may be inferred for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from smp_runtime.module_conversion.candidates import is_patched
from smp_runtime.module_conversion.in_place.experts import is_list_of_experts
from smp_runtime.module_conversion.scopes import Mark, mark_of
from smp_runtime.module_conversion.transformers_tp_plan import leaves_of_plan
from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.nn.split_in_place.linear import is_linear

if TYPE_CHECKING:
    from smp_runtime.nn.split_in_place.linear import LinearSplit


@dataclass(frozen=True)
class PlannedBlock:
    """A block, and its part of a plan.

    Attributes:
        path: within the model.
        leaves: of its linear maps, by their paths in it; None if there is no plan for it.
        source: where the plan comes from, for the log.
        is_scripts: the script wrote it.
    """

    path: str
    module: nn.Module
    leaves: Mapping[str, LinearSplit] | None = None
    source: str = "inferred"
    is_scripts: bool = False

    @property
    def kind(self) -> tuple[object, ...]:
        """Return a key that is equal for blocks that are split alike."""
        shapes = tuple((name, tuple(p.shape)) for name, p in self.module.named_parameters())
        return type(self.module), shapes, tuple((self.leaves or {}).items()), self.source

    def is_marked(self, path: str) -> bool:
        """Return whether a script marked one of the block's maps to be distributed."""
        return mark_of(self.module.get_submodule(path)).enabled


def blocks_of(model: nn.Module, is_taken: Callable[[nn.Module], bool]) -> Iterator[PlannedBlock]:
    """Yield the blocks of the outermost modules that have a plan, and those that one may be inferred for."""
    pending = [("", model)]
    planned: set[int] = set()
    while pending:
        path, module = pending.pop(0)
        mark = mark_of(module)
        if isinstance(module, DistributedModule) or id(module) in planned:
            continue
        if mark.enabled and is_taken(module):
            continue
        found = _new_blocks(path, module, mark, planned)
        planned.update(id(block.module) for block in found)
        yield from found
        has_complete_plan = bool(found) and mark.plan is not None
        if has_complete_plan or id(module) in planned:
            continue
        if _has_no_plan(module, mark, planned) and _may_be_inferred(module, is_taken):
            yield PlannedBlock(path, module)
            continue
        # A model's plan may omit modules beside its language part.
        for name, child in module.named_children():
            pending.append((f"{path}.{name}".lstrip("."), child))


def _new_blocks(path: str, module: nn.Module, mark: Mark, planned: Container[int]) -> list[PlannedBlock]:
    if not mark.enabled:
        return []
    return [block for block in _blocks_of_plan(path, module, mark) if id(block.module) not in planned]


def _has_no_plan(module: nn.Module, mark: Mark, planned: Container[int]) -> bool:
    """Return whether a module is to be distributed, but neither it nor its parts have a plan."""
    if not mark.enabled or mark.plan is not None:
        return False
    return all(id(part) not in planned for part in module.modules())


def _may_be_inferred(module: nn.Module, is_taken: Callable[[nn.Module], bool]) -> bool:
    """Return whether a module has linear maps to pair, and neither is nor contains a list of blocks."""
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
    if is_list or is_patched(module):
        return False
    maps = sum(map(is_linear, module.modules()))
    if maps < 2:
        return False
    for part in module.modules():
        if part is module:
            continue
        is_split_otherwise = isinstance(part, DistributedModule) or is_taken(part)
        if is_split_otherwise:
            return False
    return not _is_around_blocks(module)


def _is_around_blocks(module: nn.Module) -> bool:
    """Return whether a module contains lists of blocks; lists of experts do not count."""
    for part in module.modules():
        is_list = isinstance(part, nn.ModuleList | nn.Sequential)
        if not is_list or is_list_of_experts(part):
            continue
        for element in part.children():
            maps = sum(map(is_linear, element.modules()))
            if maps > 1:
                return True
    return False


def _blocks_of_plan(path: str, module: nn.Module, mark: Mark) -> Iterator[PlannedBlock]:
    is_scripts = mark.plan is not None
    source = "the script's plan" if is_scripts else "the model's own plan"
    plan = _own_plan(module) if mark.plan is None else mark.plan
    inside = _leaves_by_block(module, plan, is_scripts=is_scripts)
    for block, found in inside.items():
        if _has_inner_block(block, inside):
            continue  # a head beside the blocks: it is split separately
        part = module.get_submodule(block)
        if not is_scripts and _is_around_blocks(part):
            continue  # likewise
        are_wanted = all(mark_of(part.get_submodule(leaf)).enabled for leaf in found)
        if are_wanted and not is_patched(part):
            yield PlannedBlock(f"{path}.{block}".strip("."), part, found, source, is_scripts)


def _own_plan(module: nn.Module) -> Mapping[str, str]:
    """Return the plan that Transformers gives a module, or an empty one."""
    plan = getattr(module, "_tp_plan", None)
    return plan if isinstance(plan, Mapping) else {}


def _has_inner_block(block: str, blocks: Iterable[str]) -> bool:
    stem = f"{block}.".lstrip(".")
    return any(other != block and other.startswith(stem) for other in blocks)


def _leaves_by_block(
    module: nn.Module, plan: Mapping[str, str], *, is_scripts: bool
) -> dict[str, dict[str, LinearSplit]]:
    """Return how a plan splits the linear maps in each of its blocks, by their paths in the block."""
    inside: dict[str, dict[str, LinearSplit]] = {}
    for leaf, how in leaves_of_plan(module, plan, is_scripts=is_scripts).items():
        block = _block_of(leaf, plan)
        path = leaf[len(block) + 1 :] if block else leaf
        inside.setdefault(block, {})[path] = how
    if not is_scripts:  # splits that the plan omits in such a block may be inferred
        for block in _starred(module, plan):
            inside.setdefault(block, {})
    return inside


def _starred(module: nn.Module, plan: Mapping[str, str]) -> Iterator[str]:
    """Yield the modules that a plan's patterns name up to their first ``*``, if they have linear maps to pair."""
    stems = {pattern[: pattern.index("*") + 1] for pattern in plan if "*" in pattern}
    for path, part in module.named_modules():
        if any(_matches(path, stem) for stem in stems) and sum(map(is_linear, part.modules())) > 1:
            yield path


def _matches(path: str, pattern: str) -> bool:
    return re.fullmatch(pattern.replace(".", r"\.").replace("*", "[^.]+"), path) is not None


def _block_of(leaf: str, plan: Mapping[str, str]) -> str:
    """Return the path of a leaf up to the first ``*`` of the pattern that it matches.

    If that pattern has no ``*``, return its parent. If no pattern has one, return an empty path, which stands for
    the planned module itself.
    """
    for pattern in plan:
        if not _matches(leaf, pattern):
            continue
        parts = pattern.split(".")
        if "*" in parts:
            length = parts.index("*") + 1
            return ".".join(leaf.split(".")[:length])
        has_stars = any("*" in other for other in plan)
        return pattern.rpartition(".")[0] if has_stars else ""
    raise AssertionError(f"{leaf} is in no pattern of the plan")


def shared_with_others(model: nn.Module) -> Callable[[PlannedBlock], bool]:
    """Return a function that checks whether modules outside a block use a parameter of it."""
    uses = parameter_uses(model)

    def shared(block: PlannedBlock) -> bool:
        times = sum(part is block.module for _, part in model.named_modules(remove_duplicate=False))
        return any(uses[key] > count * times for key, count in parameter_uses(block.module).items())

    return shared


def parameter_uses(module: nn.Module) -> Counter[int]:
    """Return the number of places of each parameter, by its id; a module with several names counts under each."""
    return Counter(
        id(parameter)
        for _, part in module.named_modules(remove_duplicate=False)
        for parameter in part._parameters.values()
        if parameter is not None
    )
