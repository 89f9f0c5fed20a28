"""The parts that a partition decision places: the model as a sequence, and groups that must stay together.

A *unit* is one module's own frame, or a small module with all in it. Units stand in the order in which they
run, the modules in a module before its own frame. Units that must be on one stage and are not next to each
other form a *group*, which stands outside the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from smp_runtime.errors import SMPUserError
from smp_runtime.pipeline.partition.costs import CostModel, Need
from smp_runtime.pipeline.partition.module_tree import ModuleNode, together_with_reasons

#: A module that costs less than this part of a mean stage is not split.
_GRAIN = 0.02
#: Longest sequence; the search uses matrices with its square of entries.
_MOST_UNITS = 1200


@dataclass
class PlaceableUnit:
    """Modules that are never apart: one module's own frame, or a small module with all in it, or a bound group."""

    paths: tuple[str, ...]
    need: Need


@dataclass
class BoundUnits:
    """Units that must be on one stage, and are not next to each other."""

    need: Need  # of all of them
    gaps: tuple[int, ...]  # for each of its units, how many units of the sequence run before it
    stage: int | None  # the stage that it must be on; None if any stage will do


class Parts:
    """The parts that can be placed.

    Args:
        pinned: stages that were set by hand, by path.

    Attributes:
        sequence: units that are cut into segments.
        place_of: for every path its position in the sequence, or the number of its group.

    Raises:
        SMPUserError: pinned modules that must be together but are not, unknown paths, or stages out of range.
    """

    def __init__(self, model: CostModel, pinned: Mapping[str, int]) -> None:
        bound = _pins(model, pinned)
        bound += [_Bound(paths, f"they share {reason}") for paths, reason in together_with_reasons(model.trace)]
        followers = dict(_followers(model.trace.root, model.trace.traced))
        units, members = _joined(model, _units(model, bound, followers), bound)
        group_of: dict[int, int] = {}
        for index, (numbers, _) in enumerate(members):
            group_of.update(dict.fromkeys(numbers, index))
        alone = [number for number in range(len(units)) if number not in group_of]
        position_of = {number: position for position, number in enumerate(alone)}
        self.sequence = [units[number] for number in alone]
        self.groups = [_bound_units(units, numbers, stage, alone) for numbers, stage in members]
        self.place_of: dict[str, tuple[int | None, int | None]] = {}
        for number, unit in enumerate(units):
            place = position_of.get(number), group_of.get(number)
            self.place_of.update(dict.fromkeys(unit.paths, place))
        for path, above in followers.items():
            self.place_of[path] = self.place_of[above]
        if len(self.place_of) != len(model.needs):
            raise AssertionError("a module is in no unit")

    def __len__(self) -> int:
        return len(self.sequence) + len(self.groups)


def _bound_units(
    units: Sequence[PlaceableUnit], numbers: Sequence[int], stage: int | None, alone: Sequence[int]
) -> BoundUnits:
    """Return a group of units; ``alone`` are the numbers of the units that are in no group."""
    need = sum((units[number].need for number in numbers), Need())
    gaps = []
    for number in numbers:
        earlier = [other for other in alone if other < number]
        gaps.append(len(earlier))
    return BoundUnits(need, tuple(gaps), stage)


@dataclass
class _Bound:
    """Modules that must be on one stage: why, and on which if that is set by hand, for the module ``top``."""

    paths: tuple[str, ...]
    reason: str
    stage: int | None = None
    top: str = ""


def _pins(model: CostModel, pinned: Mapping[str, int]) -> list[_Bound]:
    """Return the bindings set by hand: each pinned module with all modules in it that are not pinned otherwise."""
    known = model.trace.nodes()
    aliases = {alias: node.path for node in known.values() for alias in node.aliases}
    stage_at: dict[str, int] = {}
    for path, stage in pinned.items():
        if path not in known and path not in aliases:
            raise SMPUserError(
                f"smp.set_partition names the module {path!r}, which the model does not have", code="SMP305"
            )
        if not 0 <= stage < model.stages:
            raise SMPUserError(
                f"module {path!r} is set to partition {stage}, but there are {model.stages} stages, 0 to "
                f"{model.stages - 1}; use one of these, or raise pipeline_parallel_degree",
                code="SMP305",
            )
        stage_at[aliases.get(path, path)] = stage
    members: dict[str, list[str]] = {path: [] for path in stage_at}

    def visit(node: ModuleNode, under: str | None) -> None:
        under = node.path if node.path in stage_at else under
        if under is not None:
            members[under].append(node.path)
        for child in node.children:
            visit(child, under)

    visit(model.trace.root, None)
    return [_Bound(tuple(paths), "one is part of the other", stage_at[top], top) for top, paths in members.items()]


def _followers(root: ModuleNode, traced: bool) -> Iterator[tuple[str, str]]:
    """Yield modules that have nothing of their own, each with the module above it that determines their stage."""

    def visit(node: ModuleNode, above: str) -> Iterator[tuple[str, str]]:
        follows = node is not root and _has_nothing(node, traced)
        if follows:
            yield node.path, above
        nearest = above if follows else node.path
        for child in node.children:
            yield from visit(child, nearest)

    yield from visit(root, "")


def _has_nothing(node: ModuleNode, traced: bool) -> bool:
    """Return whether a module is a container, or was not called while traced, and has no parameters."""
    # Parameters without elements count: another tensor parallel rank has an expert's.
    if node.parameters:
        return False
    if node.is_container:
        return True
    if not traced or node.calls:
        return False
    is_used_inside = any(inner.calls or inner.parameters for inner in node.walk())
    return not is_used_inside


def _units(model: CostModel, bound: Sequence[_Bound], followers: Mapping[str, str]) -> list[PlaceableUnit]:
    """Return the model as a sequence: the modules in a module first, then its own frame; small modules stay whole."""
    in_flight = sum(model.in_flight) / model.stages
    sizes: dict[str, int] = {}
    must_open: set[str] = set()
    bound_to: dict[str, list[int]] = {}
    for index, group in enumerate(bound):
        for path in group.paths:
            bound_to.setdefault(path, []).append(index)
    counts: dict[str, dict[int, int]] = {}
    costs: dict[str, float] = {}

    def measure(node: ModuleNode) -> tuple[Need, dict[int, int]]:
        need, inside = model.needs[node.path], dict.fromkeys(bound_to.get(node.path, ()), 1)
        for child in node.children:
            child_need, child_inside = measure(child)
            need += child_need
            for index, count in child_inside.items():
                inside[index] = inside.get(index, 0) + count
        sizes[node.path] = 1 + sum(sizes[child.path] for child in node.children)
        costs[node.path], counts[node.path] = model.share(need, in_flight), inside
        for index, count in inside.items():
            group = bound[index]
            # Bound to something outside, or bound while other modules in here are not.
            if count < len(group.paths) or (group.stage is not None and count < sizes[node.path]):
                must_open.add(node.path)
        return need, inside

    measure(model.trace.root)
    grain = _GRAIN / model.stages
    while True:
        units = list(_opened(model, model.trace.root, grain, costs, must_open, followers))
        if len(units) <= _MOST_UNITS or grain > 1:
            return units
        grain *= 2


def _opened(
    model: CostModel,
    node: ModuleNode,
    grain: float,
    costs: Mapping[str, float],
    must_open: set[str],
    followers: Mapping[str, str],
) -> Iterator[PlaceableUnit]:
    is_wanted = node.path in must_open or costs[node.path] > grain
    is_opened = is_wanted or node is model.trace.root or node.is_container
    is_follower = node.path in followers
    if node.children and node.is_divisible and is_opened:
        for child in callees_in_order(node):
            yield from _opened(model, child, grain, costs, must_open, followers)
        if not is_follower:
            yield PlaceableUnit((node.path,), model.needs[node.path])
    elif not is_follower:
        paths = tuple(inner.path for inner in node.walk() if inner.path not in followers)
        yield PlaceableUnit(paths, model.subtree(node))


def callees_in_order(node: ModuleNode) -> list[ModuleNode]:
    """Return the children by the order of calls; containers with nothing of their own are replaced by their contents.

    If the modules of two lists take turns, the result is thus the order in which the modules run.
    """

    def first_call(node: ModuleNode) -> float:
        orders = [inner.order for inner in node.walk() if inner.order >= 0]
        return min(orders, default=float("inf"))

    found: list[ModuleNode] = []
    for child in node.children:
        is_bare_container = child.is_container and not child.parameters
        found += callees_in_order(child) if is_bare_container else [child]
    return sorted(found, key=first_call)


def _joined(
    model: CostModel, units: list[PlaceableUnit], bound: Sequence[_Bound]
) -> tuple[list[PlaceableUnit], list[tuple[list[int], int | None]]]:
    """Merge units that are bound together and adjacent, or nearly; the others form groups.

    Returns:
        The units, and for each group the numbers of its units and its stage, if that is settled.
    """
    number_of = {path: number for number, unit in enumerate(units) for path in unit.paths}
    leader, stage_of = _leaders(len(units), number_of, bound)
    members: dict[int, list[int]] = {}
    for number, first in enumerate(leader):
        members.setdefault(first, []).append(number)
    root = leader[number_of[""]]
    if len(members[root]) > 1 or root in stage_of:
        # The step function runs with the root's own frame, on the last stage unless set otherwise.
        stage_of.setdefault(root, model.stages - 1)
    absorbed = _absorbed(model, units, members, stage_of)
    result: list[PlaceableUnit] = []
    new_number: dict[int, int] = {}
    for number, unit in enumerate(units):
        first = absorbed.get(number, number)
        if first != number:
            whole = result[new_number[first]]
            result[new_number[first]] = PlaceableUnit(whole.paths + unit.paths, whole.need + unit.need)
        else:
            new_number[number] = len(result)
            result.append(unit)
    groups = []
    for first, numbers in members.items():
        if first in stage_of or (len(numbers) > 1 and first not in absorbed):
            groups.append(([new_number[number] for number in numbers], stage_of.get(first)))
    return result, groups


def _leaders(count: int, number_of: Mapping[str, int], bound: Sequence[_Bound]) -> tuple[list[int], dict[int, int]]:
    """Return for each unit the first unit that it must be with, and the stages of these if they are set by hand."""
    leader = list(range(count))
    stage_of: dict[int, tuple[int, str]] = {}

    def find(number: int) -> int:
        while leader[number] != number:
            number = leader[number]
        return number

    for group in bound:
        numbers = sorted({number_of[path] for path in group.paths if path in number_of})
        if not numbers:
            continue
        first = min(find(number) for number in numbers)
        settled = [stage_of[find(number)] for number in numbers if find(number) in stage_of]
        if group.stage is not None:
            settled.append((group.stage, group.top))
        if len({stage for stage, _ in settled}) > 1:
            (one, here), (other, there) = settled[0], next(s for s in settled if s[0] != settled[0][0])
            raise SMPUserError(
                f"modules {here!r} and {there!r} are set to partitions {one} and {other}, but {group.reason}, so they must "
                f"be on one stage: set both to partition {one}",
                code="SMP305",
            )
        for number in numbers:
            leader[find(number)] = first
        if settled:
            stage_of[first] = settled[0]
    return [find(number) for number in range(count)], {first: stage for first, (stage, _) in stage_of.items()}


def _absorbed(
    model: CostModel, units: Sequence[PlaceableUnit], members: Mapping[int, list[int]], stage_of: Mapping[int, int]
) -> dict[int, int]:
    """Return for each unit that is merged, by number, the first unit of the merged one.

    These units are bound together, with next to nothing in between.
    """
    in_flight = sum(model.in_flight) / model.stages
    most_extra = _GRAIN / 2 / model.stages
    absorbed: dict[int, int] = {}
    for first, numbers in members.items():
        if len(numbers) == 1 or first in stage_of:
            continue
        span = range(numbers[0], numbers[-1] + 1)
        between = set(span) - set(numbers)
        are_alone = all(members.get(number) == [number] for number in between)
        extra = sum(model.share(units[number].need, in_flight) for number in between)
        if are_alone and extra <= most_extra:
            absorbed.update(dict.fromkeys(span, first))
    return absorbed
