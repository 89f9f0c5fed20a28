"""Choice of the blocks to split in place, and how: by the script's plan, the model's own plan, or inference."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.module_conversion.in_place.blocks import PlannedBlock, blocks_of, shared_with_others
from smp_runtime.module_conversion.in_place.capture import BATCH, calls_of
from smp_runtime.module_conversion.in_place.equivalence_check import EquivalenceCheck, NotEqualError
from smp_runtime.module_conversion.in_place.experts import expert_splits
from smp_runtime.module_conversion.in_place.plan_inference import SplitUnit, find_narrow, inferred_units, single_units
from smp_runtime.module_conversion.in_place.split_variants import is_divisible, joint_numbers, list_variants
from smp_runtime.module_conversion.in_place.tp_plan_messages import block_title, line_of, list_maps, wrong_plan
from smp_runtime.module_conversion.in_place.uncalled_modules import with_twins
from smp_runtime.module_conversion.splitting import BlockSplit, Number

if TYPE_CHECKING:
    from smp_runtime.module_conversion.in_place.block_calls import BlockCall
    from smp_runtime.nn.split_in_place.linear import LinearSplit
    from smp_runtime.nn.split_in_place.tables import Tables
    from smp_runtime.tensor_parallel.group import TensorGroup

logger = logging.getLogger("smp")

#: Seconds after which no more ways of splitting a block's pairs are tried; likewise of its single maps.
LONGEST = 120.0


@dataclass(frozen=True)
class _BlockChoice:
    """The decision for blocks that are alike.

    Attributes:
        paths: of the blocks.
        line: of the log.
        is_planned: there was a plan for them.
        error: error text if a script's plan is invalid.
    """

    paths: tuple[str, ...]
    split: BlockSplit
    line: str
    is_planned: bool
    error: str | None = None

    @classmethod
    def of(
        cls,
        blocks: Sequence[PlannedBlock],
        split: BlockSplit,
        proven: torch.dtype | None,
        why: Sequence[str],
        size: int,
    ) -> _BlockChoice:
        """Create a choice with its line for the log."""
        line = line_of(blocks, split, proven, why, size)
        return cls(tuple(block.path for block in blocks), split, line, blocks[0].leaves is not None)


def plan_splits(model: nn.Module, group: TensorGroup, is_taken: Callable[[nn.Module], bool]) -> dict[int, BlockSplit]:
    """Return the split of each block that is split in place, by its ``id``; all ranks of the group call it.

    Args:
        is_taken: whether a distributed class replaces a module.

    Raises:
        SMPUserError: a script's plan makes a block compute something else.
    """
    if group.size == 1:
        return {}
    blocks = _unshared_blocks(model, group, is_taken)
    if not blocks:
        return {}
    # One rank decides: rounding may differ between ranks, and all must split the same blocks.
    mine = _chosen(model, list(blocks.values()), group) if group.rank == 0 else None
    chosen: list[_BlockChoice] = group.agree(mine)
    found: dict[int, BlockSplit] = {}
    for choice in chosen:
        if choice.error is not None:
            raise SMPUserError(choice.error, code="SMP307")
        if choice.split.leaves or choice.split.tables:
            found |= {id(blocks[path].module): choice.split for path in choice.paths}
    if group.ranks.rank == 0:
        _say(chosen, group)
    return found


def _unshared_blocks(
    model: nn.Module, group: TensorGroup, is_taken: Callable[[nn.Module], bool]
) -> dict[str, PlannedBlock]:
    """Return the blocks to split by path; warn of planned ones that share a weight with another module."""
    shared = shared_with_others(model)
    blocks: dict[str, PlannedBlock] = {}
    for block in blocks_of(model, is_taken):
        if not shared(block):
            blocks[block.path] = block
        elif group.rank == 0 and block.leaves is not None:
            logger.warning("%s is not split in place: it shares a weight with another module", block_title([block]))
    return blocks


def _say(chosen: Iterable[_BlockChoice], group: TensorGroup) -> None:
    is_any = False
    for choice in chosen:
        is_split = bool(choice.split.leaves or choice.split.tables)
        is_any = is_any or is_split
        is_disappointing = choice.is_planned and not is_split
        level = logging.WARNING if is_disappointing else logging.INFO
        logger.log(level, "%s", choice.line)
    if is_any and group.slices_activations:
        logger.info(
            "optimize is memory, but blocks that are split in place do not slice activations: each rank keeps those of all rows of "
            "the batch of %d ranks, as under optimize: speed; activation checkpointing saves memory here too",
            group.size,
        )


def _chosen(model: nn.Module, blocks: Sequence[PlannedBlock], group: TensorGroup) -> list[_BlockChoice]:
    kinds: list[list[PlannedBlock]] = []
    try:
        kinds, calls = _kinds(model, blocks)
        return [_choice(alike, calls.get(alike[0].path), group) for alike in kinds]
    except Exception as error:  # the other ranks wait for a decision, and splitting single maps is always possible
        why = [f"trying it out failed: {type(error).__name__}: {str(error)[:160]}"]
        return [
            _BlockChoice.of(alike, BlockSplit({}), None, why, group.size)
            for alike in kinds or _alike(blocks, lambda b: b.kind)
        ]


def _kinds(model: nn.Module, blocks: Sequence[PlannedBlock]) -> tuple[list[list[PlannedBlock]], dict[str, BlockCall]]:
    """Group blocks that are split alike; return the groups, and the calls of their blocks.

    The first of several blocks is often called differently, since it makes the inputs of the others.
    """
    kinds = _alike(blocks, lambda block: block.kind)
    some = {block.path: block.module for alike in kinds for block in alike[:2]}
    calls = calls_of(model, some)

    def signature(block: PlannedBlock) -> object:
        call = calls.get(block.path)
        return None if call is None else call.signature

    def are_called_alike(alike: Sequence[PlannedBlock]) -> bool:
        return len(alike) < 2 or signature(alike[1]) == signature(alike[0])

    if not all(map(are_called_alike, kinds)):
        calls = calls_of(model, {block.path: block.module for block in blocks})
        kinds = _alike(blocks, lambda block: (block.kind, signature(block)))
    return kinds, calls


def _alike(blocks: Iterable[PlannedBlock], key: Callable[[PlannedBlock], object]) -> list[list[PlannedBlock]]:
    found: dict[object, list[PlannedBlock]] = {}
    for block in blocks:
        found.setdefault(key(block), []).append(block)
    return list(found.values())


def _choice(blocks: list[PlannedBlock], call: BlockCall | None, group: TensorGroup) -> _BlockChoice:
    """Choose the split of blocks of one kind, and the line for the log."""
    first = blocks[0]
    proof, why = _proof_of(first, call, group)
    units = _planned_units(first) if first.leaves is not None else []
    split = BlockSplit({})
    if proof is None:
        if first.is_scripts and group.prescaled:
            split = _together(unit for unit in units if is_divisible(first.module, unit, group.size) is None)
        return _BlockChoice.of(blocks, split, None, why, group.size)
    if not first.is_scripts:
        split, failed = _improved(proof, first, units, group)
        why += [f"{list_maps(unit)} {_fate(unit, split)}: {reason}" for unit, reason in failed]
        return _BlockChoice.of(blocks, split, proof.dtype, why, group.size)
    split, failed = _grown(proof, first.module, split, units, group.size)
    if failed:
        unproven = _BlockChoice.of(blocks, split, None, [], group.size)
        return replace(unproven, error=wrong_plan(first, failed, group.size))
    return _BlockChoice.of(blocks, split, proof.dtype, why, group.size)


def _improved(
    proof: EquivalenceCheck, block: PlannedBlock, units: list[SplitUnit], group: TensorGroup
) -> tuple[BlockSplit, list[tuple[SplitUnit, str]]]:
    """Return a split with inferred units beside those of the model's own plan, and the units that failed, with the reasons."""
    inferred = [unit for unit in inferred_units(proof.block, proof.seen) if all(map(block.is_marked, unit.leaves))]
    joined = [unit for unit in units if any(how.joins for how in unit.leaves.values())]
    others = [unit for unit in units if unit not in joined]
    units = [*others, *inferred, *joined]  # a plan that gathers may be improved
    split = _with_experts(proof, block, group)
    split, failed = _grown(proof, block.module, split, units, group.size)
    whole = {*split.leaves, *find_narrow(proof.block, proof.seen, split.leaves)}
    left = [path for path in dict(proof.seen) if path not in whole and block.is_marked(path)]
    split, _ = _grown(proof, block.module, split, list(single_units(block.module, left)), group.size)
    return with_twins(proof, split, group.size), failed


def _proof_of(
    block: PlannedBlock, call: BlockCall | None, group: TensorGroup
) -> tuple[EquivalenceCheck | None, list[str]]:
    """Return the check that tries out splits of a block, or None and the reasons why there is none."""
    if call is None:
        return None, ["nothing is known of how it is called"]
    proof, why = None, ""
    for dtype in (torch.float64, torch.float32):
        try:
            proof = EquivalenceCheck(block.module, call, group.size, dtype)
            break
        except Exception as error:  # any error means that the recorded call does not fit the block
            why = why or f"it does not run by itself ({type(error).__name__}: {str(error)[:120]})"
    if proof is None:
        return None, [why]
    if not group.prescaled and not proof.is_by_rows(BATCH):
        return None, ["with a batch per rank: what it takes or returns cannot be told apart by its rows"]
    return proof, []


def _with_experts(proof: EquivalenceCheck, block: PlannedBlock, group: TensorGroup) -> BlockSplit:
    """Return a split with the first correct split of each mixture of experts."""
    split = BlockSplit({})
    for _, found in expert_splits(block.module, proof.seen, group.size, is_spread=group.spreads_experts):
        for candidate in found:
            if not all(map(block.is_marked, (*candidate.leaves, *candidate.tables))):
                continue
            together = replace(
                candidate,
                leaves={**split.leaves, **candidate.leaves},
                numbers=(*split.numbers, *candidate.numbers),
                regions=(*split.regions, *candidate.regions),
                tables={**split.tables, **candidate.tables},
            )
            with contextlib.suppress(NotEqualError):
                split = proof.prove(together)
                break
    return split


def _grown(
    proof: EquivalenceCheck, block: nn.Module, split: BlockSplit, units: Sequence[SplitUnit], size: int
) -> tuple[BlockSplit, list[tuple[SplitUnit, str]]]:
    """Extend a split by all units, or else by each unit that is correct; return why the others failed."""
    until = time.monotonic() + LONGEST
    for candidate in _in_time(_joint_candidates(proof, block, units, split, size), until):
        with contextlib.suppress(NotEqualError):
            return proof.prove(candidate), []
    failed: list[tuple[SplitUnit, str]] = []
    for unit in units:
        if not unit.leaves or unit.leaves.keys() & split.leaves.keys():
            continue
        best = NotEqualError(is_divisible(block, unit, size) or "", -1)
        for candidate in _in_time(_candidates(proof, block, unit, split, size), until):
            try:
                split = proof.prove(candidate)
                break
            except NotEqualError as error:
                best = max(best, error, key=lambda e: e.progress)
        else:
            late = f"; no more was tried after {LONGEST:.0f} s" if time.monotonic() > until else ""
            failed.append((unit, str(best)[:160] + late))
    return split, [(unit, why) for unit, why in failed if not unit.leaves.keys() & split.leaves.keys()]


def _in_time(candidates: Iterator[BlockSplit], until: float) -> Iterator[BlockSplit]:
    """Yield the first candidate, and more until the deadline.

    Wide blocks take seconds to try out, and the other ranks wait meanwhile.
    """
    yield from itertools.islice(candidates, 1)
    yield from itertools.takewhile(lambda _: time.monotonic() < until, candidates)


def _joint_candidates(
    proof: EquivalenceCheck, block: nn.Module, units: Sequence[SplitUnit], beside: BlockSplit, size: int
) -> Iterator[BlockSplit]:
    """Yield splits with all units at once; of units that overlap, only the likelier is used."""
    chosen: list[SplitUnit] = []
    taken = set(beside.leaves)
    for unit in units:
        if taken.isdisjoint(unit.leaves):
            chosen.append(unit)
            taken.update(unit.leaves)
    if any(is_divisible(block, unit, size) is not None for unit in chosen):
        return
    joint: Iterable[tuple[tuple[Number, ...], dict[str, Tables]]] = [((), {})]
    if len(chosen) > 1:
        joint = joint_numbers(block, chosen, size)
    for numbers, tables in joint:
        yield from _with_arguments(proof, _together(chosen, beside, numbers), numbers, tables)


def _candidates(
    proof: EquivalenceCheck, block: nn.Module, unit: SplitUnit, beside: BlockSplit, size: int
) -> Iterator[BlockSplit]:
    """Yield splits that add one unit to the present split, the likelier first."""
    for variant, numbers, tables in list_variants(block, unit, size):
        yield from _with_arguments(proof, _together([variant], beside, numbers), numbers, tables)


def _with_arguments(
    proof: EquivalenceCheck, split: BlockSplit, numbers: Sequence[Number], tables: Mapping[str, Tables]
) -> Iterator[BlockSplit]:
    """Yield a split with tables, and one with slices of the arguments that have an entry for each head."""
    split = replace(split, tables={**split.tables, **tables})
    yield split
    if arguments := proof.slices_of_arguments(numbers):
        yield replace(split, arguments=tuple(dict.fromkeys((*split.arguments, *arguments))))


def _together(
    units: Iterable[SplitUnit], beside: BlockSplit | None = None, numbers: Iterable[Number] = ()
) -> BlockSplit:
    before = BlockSplit({}) if beside is None else beside
    leaves, replicated, views = dict(before.leaves), set(before.replicated), set(before.views)
    for unit in units:
        leaves |= unit.leaves
        replicated |= set(unit.replicated)
        views |= set(unit.views)
    return replace(
        before,
        leaves=leaves,
        numbers=tuple(sorted({*before.numbers, *numbers})),
        replicated=tuple(sorted(replicated)),
        views=tuple(sorted(views)),
    )


def _fate(unit: SplitUnit, split: BlockSplit) -> str:
    left = [path for path in unit.leaves if path not in split.leaves]
    if len(left) == len(unit.leaves):
        return "stay whole"
    return f"are split one by one{', but for ' if left else ''}{', '.join(left)}"


def _planned_units(block: PlannedBlock) -> list[SplitUnit]:
    """Group a plan's linear maps by parent: those of one parent are split together or not at all."""
    units: dict[str, dict[str, LinearSplit]] = {}
    for path, how in (block.leaves or {}).items():
        units.setdefault(path.rpartition(".")[0], {})[path] = how
    return [SplitUnit(leaves) for leaves in units.values()]
