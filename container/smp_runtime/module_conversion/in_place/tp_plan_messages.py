"""Log lines about blocks that are split in place, and error texts for a script's plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from smp_config.errors import kind_of
from smp_runtime.nn.split_in_place.linear import is_linear

if TYPE_CHECKING:
    import torch
    from torch import nn

    from smp_runtime.module_conversion.in_place.blocks import PlannedBlock
    from smp_runtime.module_conversion.in_place.plan_inference import SplitUnit
    from smp_runtime.module_conversion.splitting import BlockSplit


def line_of(
    blocks: Sequence[PlannedBlock], split: BlockSplit, proven: torch.dtype | None, why: Sequence[str], size: int
) -> str:
    """Return the log line for blocks that are alike: how they are split, why not otherwise, what was proven."""
    first = blocks[0]
    if not split.leaves and not split.tables:
        said = f"{block_title(blocks)}: {first.source}, but not split in place; each linear map is split by itself"
    else:
        said = f"{block_title(blocks)}: {first.source}, {len(split.leaves)} of {_linears(first.module)} linear maps"
        said += f", {_share(first.module, split):.0%} of its parameters are split over {size} ranks"
        for path in split.regions:
            said += f"; {path or 'it'} {'has whole experts on each rank' if _is_spread(split) else 'has a part of each expert'}"
        said += (
            f"; numbers of a rank: {', '.join('.'.join(number[:2]).lstrip('.') for number in split.numbers)}"
            if split.numbers
            else ""
        )
        said += f"; equal to the whole in {str(proven).removeprefix('torch.')}" if proven else "; not tried out"
    return said + (f" ({'; '.join(why)})" if why else "")


def wrong_plan(block: PlannedBlock, failed: list[tuple[SplitUnit, str]], size: int) -> str:
    """Return the error text for an invalid tensor parallel plan."""
    reasons = [f"{list_maps(unit)}: {why}" for unit, why in failed]
    return (
        f"the plan of {kind_of(block.module)} ({block.path or 'the model'}) over {size} ranks makes it compute something "
        f"else than the whole one: {'; '.join(reasons)}. It was tried with all parts in one process, on random numbers in float64: "
        "colwise maps must be followed by rowwise ones, with only what works on single heads or features between them, and the "
        "ranks must divide the heads; change the plan, or leave it out"
    )


def _is_spread(split: BlockSplit) -> bool:
    if any(how.owner is not None for how in split.leaves.values()):
        return True
    return any(tables.is_spread for tables in split.tables.values())


def list_maps(unit: SplitUnit) -> str:
    """Return the names of a unit's linear maps, for a message."""
    paths = list(unit.leaves)
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")


def block_title(blocks: Sequence[PlannedBlock]) -> str:
    """Return the number of blocks, their class and their place, for a message."""
    first, last = blocks[0], blocks[-1]
    kind = type(first.module).__name__
    place = first.path or "the model"
    if len(blocks) == 1:
        return f"{kind} ({place})"
    return f"{len(blocks)} × {kind} ({place} to {last.path})"


def _linears(module: nn.Module) -> int:
    return sum(map(is_linear, module.modules()))


def _share(block: nn.Module, split: BlockSplit) -> float:
    """Return the share of a block's parameters that is not whole on every rank."""
    total = sum(p.numel() for p in block.parameters())
    halved = 0
    for path, how in split.leaves.items():
        linear: Any = block.get_submodule(path)
        if how.runs:
            continue
        halved += linear.weight.numel()
        if how.columns and linear.bias is not None:
            halved += linear.bias.numel()
    for path, tables in split.tables.items():
        table = block.get_submodule(path)
        halved += sum(table.get_parameter(name).numel() for name, _, _ in tables.cuts)
    return halved / max(1, total)
