"""Which module of a model runs on which pipeline stage: the tree of its modules in SVG, a column for each depth."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from smp_config import ConfigError
from smp_estimator.figures.svg import WIDTH, box, colour, ink_on, legend, picture, shorten, text

#: The color of a module with parts on several stages.
_SEVERAL = "#6e7781"

#: Columns for modules within modules; what is deeper counts for the module that holds it.
_MOST_COLUMNS = 6

#: Least height of a box with its name, and of all boxes together.
_READABLE, _LEAST, _MOST = 13.0, 90.0, 720.0


@dataclass
class _Node:
    """A module of the tree; ``path`` is that of ``named_modules()``."""

    path: str
    own: float = 0.0  # its weight without its children's
    stage: int | None = None  # its own; None if it is not known
    children: dict[str, _Node] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2] or "model"

    @cached_property
    def weight(self) -> float:
        return self.own + sum(child.weight for child in self.children.values())

    @cached_property
    def stages(self) -> frozenset[int]:
        own = frozenset() if self.stage is None else frozenset({self.stage})
        return own.union(*(child.stages for child in self.children.values()))


@dataclass(frozen=True)
class Partition:
    """Modules and their stages; a notebook shows them as a tree, and each module as high as its part of the whole.

    Attributes:
        stages: of the pipeline.
        modules: the stage of each module by its path, as of ``named_modules()``; the model itself is ``""``.
        shares: by path, the part of the whole that a module has without those inside it, in any unit; without any, all
            modules that hold no others have equal ones.
        measure: what the shares are parts of, in words.
    """

    stages: int
    modules: Mapping[str, int]
    shares: Mapping[str, float] = field(default_factory=dict)
    measure: str = "modules"

    def _repr_html_(self) -> str:
        tree = self._tree()
        leaves = sum(1 for path in self.modules if not any(other.startswith(f"{path}.") for other in self.modules))
        height = min(max(leaves * (_READABLE + 4), _LEAST), _MOST)
        columns = min(_MOST_COLUMNS, 1 + max((path.count(".") + 1 for path in self.modules if path), default=0))
        wide = (WIDTH - 8) / columns
        parts = list(self._boxes(tree, 4, 26, wide, height, columns))
        totals = self._totals(tree)
        entries = [
            (colour(stage), f"stage {stage}: {totals.get(stage, 0.0) / (sum(totals.values()) or 1.0):.0%}")
            for stage in range(min(self.stages, 8))
        ]
        parts += legend(height + 46, [*entries, (_SEVERAL, "several")])
        stages = f"{self.stages} stage{'s' * (self.stages != 1)}"
        title = f"{len(self.modules):,} modules on {stages}; heights are parts of the {self.measure}"
        return picture(title, height + 58, parts)

    def _tree(self) -> _Node:
        root = _Node("")
        for path in self.modules:
            node = root
            names = path.split(".") if path else []
            for depth in range(len(names)):
                here = ".".join(names[: depth + 1])
                node = node.children.setdefault(names[depth], _Node(here))
            node.stage = self.modules[path]
        for path, node in _nodes(root):
            node.own = self.shares.get(path, 0.0) if self.shares else float(not node.children)
        return root

    def _totals(self, tree: _Node) -> dict[int, float]:
        totals: dict[int, float] = {}
        for _, node in _nodes(tree):
            if node.stage is not None:
                totals[node.stage] = totals.get(node.stage, 0.0) + node.own
        return totals

    def _boxes(self, node: _Node, x: float, y: float, wide: float, high: float, columns: int) -> Iterator[str]:
        fill = colour(min(node.stages)) if len(node.stages) == 1 else _SEVERAL
        yield box(x, y, wide - 2, max(high - 1.5, 0.5), fill, self._tooltip(node))
        if high >= _READABLE:
            label = f"{node.name} · {_listed(node.stages)}" if len(node.stages) > 1 else node.name
            yield text(x + 5, y + min(high / 2 + 4, 15), shorten(label, wide - 12), ink=ink_on(fill))
        if columns == 1:
            return
        top = y
        for child in _shown_children(node, high):
            part_high = high * child.weight / node.weight
            yield from self._boxes(child, x + wide, top, wide, part_high, columns - 1)
            top += part_high

    def _tooltip(self, node: _Node) -> str:
        if node.stages:
            plural = "s" if len(node.stages) > 1 else ""
            place = f"stage{plural} {_listed(node.stages)}"
        else:
            place = "no stage"
        whole = self._whole
        part = f", {node.weight / whole:.1%}" if whole else ""
        return f"{node.path or 'model'}: {place}{part}"

    @cached_property
    def _whole(self) -> float:
        return sum(self.shares.values())


def _listed(stages: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(stages)))


def _shown_children(node: _Node, high: float) -> list[_Node]:
    """Return the modules inside one that have boxes of their own."""
    if not node.weight:
        return []
    children = node.children.values()
    shown = [child for child in children if child.weight]
    if len(node.stages) > 1 or not shown:
        return shown
    # Parts of one stage are told apart only if there is room; if the stage changes, always.
    lightest = min(child.weight for child in shown)
    if high * lightest / node.weight < _READABLE:
        return []
    return shown


def _nodes(node: _Node) -> Iterator[tuple[str, _Node]]:
    yield node.path, node
    for child in node.children.values():
        yield from _nodes(child)


def read_partition(path: str | os.PathLike[str]) -> Partition:
    """Read a partition that a job has written (``partition_file``).

    Args:
        path: the partition file.

    Raises:
        ConfigError: the file cannot be read, or no job wrote it.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        stages, modules = data["stages"], data["modules"]
        whole = isinstance(modules, dict) and all(
            type(stage) is int and 0 <= stage < stages for stage in modules.values()
        )
    except OSError as error:
        raise ConfigError(
            f"the partition {os.fspath(path)} cannot be read ({error.strerror}); a job with the parameter partition_file writes it "
            "beside its checkpoints and its output: give the path of that file",
            code="SMP116",
        ) from None
    except (ValueError, TypeError, KeyError, RecursionError):
        whole = False
    if not whole:
        raise ConfigError(
            f"{os.fspath(path)} is no partition that a job wrote: it has no stage for every module; give the file that the "
            "parameter partition_file named",
            code="SMP116",
        )
    return Partition(stages, modules)
