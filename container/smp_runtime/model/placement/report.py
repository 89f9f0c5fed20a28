"""A report, as text for the log, of tensor parallelism and sharding on a rank's part of a model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_config import Group
from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.parameters.registry import intervals
from smp_runtime.pipeline.partition.report import format_table

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.model.local_part import LocalPart
    from smp_runtime.parameters.registry import ParameterRecord
    from smp_runtime.sharding.sharded_parameters import ShardedParameters

#: Of longer lists the rest is counted.
_MOST_ROWS = 24
_MOST_NAMES = 6

_UNITS = (("GiB", 30), ("MiB", 20), ("KiB", 10))

_NUMBER = re.compile(r"\d+")


def describe_placement(part: LocalPart, shards: ShardedParameters | None, ranks: Ranks) -> Iterator[str]:
    """Yield a text for each active strategy: split and whole parameters, and this rank's share."""
    records = [record for record in part.registry if part.has_tensor(record.name)]
    where = f"rank {ranks.rank}"
    if ranks.size(Group.PP) > 1:
        where = f"stage {part.stage}, {where}"
    if ranks.size(Group.TP) > 1:
        yield "\n".join(_split(part, records, where, ranks.size(Group.TP)))
    if shards is not None:
        yield "\n".join(_sharded(shards, records, where, ranks.size(Group.SHARD)))


@dataclass(frozen=True)
class _SharedItem:
    """Something that is shared out.

    Attributes:
        whole: elements over all ranks.
        here: elements on this rank.
    """

    path: str
    what: str
    whole: int
    here: int


# -- tensor parallelism ------------------------------------------------------------------------------------------------


def _split(part: LocalPart, records: Sequence[ParameterRecord], who: str, degree: int) -> list[str]:
    modules = dict(_outermost(part))
    rows, inside = [], set()
    for path, module in modules.items():
        mine = [record for record in records if _lies_in(record, path)]
        inside |= {record.name for record in mine}
        former = getattr(module, "replaced_class", None)
        what = f"{former} → {type(module).__name__}" if former else type(module).__name__
        rows.append(_SharedItem(path or "(model)", what, _elements(mine), sum(map(_local_elements, mine))))
    held = sum(_local_elements(r) * r.parameter.element_size() for r in records)
    total = sum(_elements([r]) * r.parameter.element_size() for r in records)
    lines = [f"Tensor parallelism over {degree} ranks: {who} holds {_share(held, total)} of parameters"]
    if rows:
        lines += _listed(rows)
    kept = [r for r in records if r.name in inside and r.placement.tensor_axis is None]
    if kept:
        lines.append(
            f"  whole on every rank: {_elements(kept):,} parameters in {_tensors(kept)} of distributed modules, because each rank "
            "needs them (norms, biases that are added to a sum) or nobody asked (embeddings without distribute_embedding): "
            f"{_largest(kept)}"
        )
    others = [r for r in records if r.name not in inside]
    if others:
        lines.append(
            f"  whole on every rank: {_elements(others):,} parameters of modules that are not distributed, because nothing marked "
            f"them or they have no distributed form: {_largest(others)}"
        )
    return lines


def _outermost(part: LocalPart) -> Iterator[tuple[str, DistributedModule]]:
    """Yield distributed modules of this rank that are not inside another one."""
    last: str | None = None
    for path, module in part.named_modules():
        if not isinstance(module, DistributedModule):
            continue
        is_inside = last is not None and _is_below(path, last)
        if not is_inside:
            last = path
            yield path, module


def _is_below(path: str, other: str) -> bool:
    if not other or path == other:
        return True
    return path.startswith(f"{other}.")


def _lies_in(record: ParameterRecord, path: str) -> bool:
    return any(_is_below(name.rpartition(".")[0], path) for name in record.names)


def _local_elements(record: ParameterRecord) -> int:
    whole = _elements([record])
    place = record.placement
    if place.tensor_axis is None or place.tensor_slice is None:
        return whole
    length = sum(stop - start for start, stop in intervals(place.tensor_slice))
    return whole // max(1, record.shape[place.tensor_axis]) * length


# -- sharding ----------------------------------------------------------------------------------------------------------


def _sharded(shards: ShardedParameters, records: Sequence[ParameterRecord], who: str, degree: int) -> list[str]:
    in_units = shards.parameters
    whole = [record for record in records if record.parameter not in in_units]
    kept = sum(_local_elements(r) * r.parameter.element_size() for r in whole)
    held = kept + sum(unit.shard_elements * unit.dtype.itemsize for unit in shards.units)
    total = kept + sum(unit.filled * unit.dtype.itemsize for unit in shards.units)
    lines = [f"Sharded over {degree} ranks: {who} holds {_share(held, total)} of parameters"]
    if shards.units:
        names = Counter(unit.name for unit in shards.units)
        rows = [
            _SharedItem(
                unit.name or "(model)", str(unit.dtype).removeprefix("torch."), unit.filled, unit.shard_elements
            )
            for unit in shards.units
        ]
        lines += _listed(rows, apart=any(count > 1 for count in names.values()))
    else:
        lines.append("  nothing is sharded")
    threshold = shards.options.persistence_threshold
    small = [r for r in whole if r.parameter.is_floating_point()]
    if small:
        elements = sum(map(_local_elements, small))
        lines.append(
            f"  whole on every rank: {elements:,} parameters in {_tensors(small)}, each below sdp_param_persistence_threshold "
            f"({threshold:,}; 0 shards all): {_largest(small)}"
        )
    return lines


# -- both --------------------------------------------------------------------------------------------------------------


def _listed(rows: Sequence[_SharedItem], apart: bool = False) -> list[str]:
    """Return the lines of a table of the shared items.

    Alike items of numbered modules are one row; ``apart`` lists each.
    """
    groups: dict[tuple[str, str, int, int], list[_SharedItem]] = {}
    for number, row in enumerate(rows):
        pattern = f"{number}" if apart else _NUMBER.sub("#", row.path)
        groups.setdefault((pattern, row.what, row.whole, row.here), []).append(row)
    cells = [("module", "kind", "parameters", "on this rank")]
    for alike in list(groups.values())[:_MOST_ROWS]:
        what = alike[0].what
        if len(alike) > 1:
            what = f"{len(alike)} × {what}"
        whole = sum(row.whole for row in alike)
        here = sum(row.here for row in alike)
        cells.append((_path_of([row.path for row in alike]), what, f"{whole:,}", f"{here:,}"))
    lines = list(format_table(cells))
    more = len(groups) - _MOST_ROWS
    if more > 0:
        lines.append(f"  … and {more} more")
    return lines


def _path_of(paths: Sequence[str]) -> str:
    """Return one text, such as ``layers.0–11.mlp``, for paths that differ in their numbers only."""
    numbers = [[int(found) for found in _NUMBER.findall(path)] for path in paths]
    columns = iter(zip(*numbers, strict=True))

    def merged(match: re.Match[str]) -> str:
        column = sorted(set(next(columns)))
        return str(column[0]) if len(column) == 1 else f"{column[0]}–{column[-1]}"

    return _NUMBER.sub(merged, paths[0])


def _largest(records: Sequence[ParameterRecord]) -> str:
    """Return the names of the largest tensors with their elements, those of numbered modules together."""
    groups: dict[tuple[str, int], list[str]] = {}
    for record in records:
        groups.setdefault((_NUMBER.sub("#", record.name), _local_elements(record)), []).append(record.name)
    ordered = sorted(groups.items(), key=lambda group: -group[0][1] * len(group[1]))
    named = []
    for (_, elements), names in ordered[:_MOST_NAMES]:
        count = f"{len(names)} × " if len(names) > 1 else ""
        named.append(f"{_path_of(names)} {count}{elements:,}")
    more = sum(len(names) for _, names in ordered[_MOST_NAMES:])
    return ", ".join(named) + (f", … and {more} more" if more else "")


def _elements(records: Iterable[ParameterRecord]) -> int:
    total = 0
    for record in records:
        count = 1
        for size in record.shape:
            count *= size
        total += count
    return total


def _tensors(records: Sequence[ParameterRecord]) -> str:
    return "1 tensor" if len(records) == 1 else f"{len(records)} tensors"


def _share(held: int, total: int) -> str:
    """Format a share, such as ``118.8 of 474.7 MiB``, in the unit that suits the whole."""
    unit, power = next((row for row in _UNITS if total >= 2 ** row[1]), _UNITS[-1])
    size = 2**power
    return f"{held / size:,.1f} of {total / size:,.1f} {unit}"
