"""The partition decision as text for the log."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from smp_runtime.pipeline.partition.costs import CostModel, CostSettings, StageCost, balance, find_callees
from smp_runtime.pipeline.partition.module_tree import ModuleNode, Trace, together_with_reasons

if TYPE_CHECKING:
    from smp_runtime.pipeline.partition.assignment import Assignment

#: Shares that are not shown as 0.0%.
_VISIBLE = 0.0005

_NUMBERED = re.compile(r"^(.*\.|)(\d+)$")


def describe(trace: Trace, assignment: Assignment, settings: CostSettings | None = None) -> str:
    """Return the report: ``Partition assignments:``, a tree of modules, and the prediction for every stage.

    A module that is on one stage with all in it is one line, and so are numbered modules of one type in a row.
    Below one that is split, its own code has a line. The costs of the tree add up to that of the model, 100 %.
    Those of the stages add up to more, since they include traffic.
    """
    model = CostModel(trace, assignment.stages, settings or CostSettings())
    costs = model.stage_costs(assignment.stage_of)
    rows = [("module", "type", "parameters", "cost", "stage"), *_rows(model, assignment, [trace.root], 0)]
    together = [
        f"  together: {', '.join(path or '(model)' for path in paths)} ({reason})"
        for paths, reason in _few(together_with_reasons(trace))
    ]
    return "\n".join(
        ["Partition assignments:", *format_table(rows), *together, *_summary(costs, model.settings.memory_weight)]
    )


def _rows(
    model: CostModel, assignment: Assignment, siblings: Sequence[ModuleNode], depth: int
) -> Iterator[tuple[str, ...]]:
    for run in _runs(assignment, siblings):
        first = run[0]
        need = sum((model.subtree(node) for node in run[1:]), model.subtree(first))
        share = model.share(need, sum(model.in_flight) / model.stages)
        elements = sum(node.elements for node in run)
        has_nothing = not elements and not need.work
        if has_nothing and depth:
            continue
        name, type_name = _name_of_run(run)
        stages = _stages_of_run(assignment, run)
        is_split = len(stages) > 1
        where = str(stages[0])
        if is_split:
            where = f"{_ranges(stages)}, own code {assignment.stage_of(first.path)}"
        yield "  " * depth + name, type_name, f"{elements:,}", f"{share:.1%}", where
        if is_split:
            yield from _rows(model, assignment, find_callees(first), depth + 1)
            yield from _own_code(model, assignment, first, depth + 1)


def _name_of_run(run: Sequence[ModuleNode]) -> tuple[str, str]:
    """Return the name and the type of modules that share a line."""
    first = run[0]
    name = first.path or "(model)"
    if len(run) == 1:
        return name, first.type_name
    last_part = run[-1].path.rpartition(".")[2]
    return f"{name}–{last_part}", f"{len(run)} × {first.type_name}"


def _stages_of_run(assignment: Assignment, run: Sequence[ModuleNode]) -> list[int]:
    """Return the stages that hold the modules and the modules inside them; containers have no code to place."""
    stages: set[int] = set()
    for top in run:
        stages.update(assignment.stage_of(node.path) for node in top.walk() if not node.is_container)
    return sorted(stages)


def _own_code(model: CostModel, assignment: Assignment, node: ModuleNode, depth: int) -> Iterator[tuple[str, ...]]:
    """Yield the line for a split module's own parameters and code, if there are any."""
    share = model.share(model.needs[node.path], sum(model.in_flight) / model.stages)
    elements = sum(held.elements for held in node.parameters)
    is_visible = elements or share >= _VISIBLE
    if is_visible:
        stage = str(assignment.stage_of(node.path))
        yield "  " * depth + "(own code)", node.type_name, f"{elements:,}", f"{share:.1%}", stage


def _runs(assignment: Assignment, siblings: Sequence[ModuleNode]) -> Iterator[list[ModuleNode]]:
    """Yield siblings in groups: numbered one after the other, of one type, wholly on one stage."""
    run: list[ModuleNode] = []
    for node in siblings:
        if (
            run
            and _continues(run[-1], node)
            and _only_stage(assignment, run[-1]) == _only_stage(assignment, node) != -1
        ):
            run.append(node)
            continue
        if run:
            yield run
        run = [node]
    if run:
        yield run


def _continues(before: ModuleNode, node: ModuleNode) -> bool:
    one, other = _NUMBERED.match(before.path), _NUMBERED.match(node.path)
    if not one or not other or before.type_name != node.type_name:
        return False
    return one[1] == other[1] and int(one[2]) + 1 == int(other[2])


def _only_stage(assignment: Assignment, node: ModuleNode) -> int:
    """Return the stage of a module with all in it; -1 if it is split."""
    stages = {assignment.stage_of(inner.path) for inner in node.walk() if not inner.is_container}
    return stages.pop() if len(stages) == 1 else -1


def _summary(costs: Sequence[StageCost], memory_weight: float) -> list[str]:
    rows = [("stage", "parameters", "memory", "work", "traffic", "cost")]
    for stage, cost in enumerate(costs):
        shares = (f"{cost.memory:.1%}", f"{cost.work:.1%}", f"{cost.traffic:.1%}", f"{cost.cost:.1%}")
        rows.append((str(stage), f"{cost.elements:,}", *shares))
    how = f"  cost = {memory_weight:g} × memory + {1 - memory_weight:g} × work + traffic, which comes on top of the 100% above"
    return [*format_table(rows), how, f"  predicted balance (greatest ÷ mean cost of a stage): {balance(costs):.2f}"]


def format_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as lines with aligned columns; columns of figures are aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if _is_figure(rows, column) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def _is_figure(rows: Sequence[tuple[str, ...]], column: int) -> bool:
    if not 0 < column < len(rows[0]):
        return False
    cells = [row[column] for row in rows[1:]]
    return all(cell[:1].isdigit() and " " not in cell for cell in cells)


def _ranges(stages: Sequence[int]) -> str:
    if len(stages) > 2 and stages[-1] - stages[0] == len(stages) - 1:
        return f"{stages[0]}–{stages[-1]}"
    return ", ".join(map(str, stages))


def _few(groups: list[tuple[tuple[str, ...], str]]) -> list[tuple[tuple[str, ...], str]]:
    """Return the first eight groups of modules that are far apart; a list of parameters with its owner is left out."""
    far_apart = []
    for paths, reason in groups:
        first, *others = paths
        has_owner = any(path and first.startswith(path) for path in others)
        if not has_owner:
            far_apart.append((paths, reason))
    return far_apart[:8]
