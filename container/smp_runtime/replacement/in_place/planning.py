"""Which blocks of a model are split in place, and how: by the script's plan, the model's own, or what can be inferred."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.nn.planned.linear import LinearSplit, is_linear
from smp_runtime.replacement.candidates import is_patched
from smp_runtime.replacement.in_place.capture import BATCH, calls_of
from smp_runtime.replacement.in_place.experts import expert_splits, is_list_of_experts
from smp_runtime.replacement.in_place.inference import Unit, inferred_units, single
from smp_runtime.replacement.in_place.proof import Call, NotEqualError, Proof
from smp_runtime.replacement.in_place.splitting import Number, Split
from smp_runtime.replacement.in_place.styles import leaves_of_plan
from smp_runtime.replacement.in_place.variants import is_divisible, variants
from smp_runtime.replacement.scopes import Mark, mark_of

if TYPE_CHECKING:
    from smp_runtime.tensor_parallel.group import TensorGroup

logger = logging.getLogger("smp")


@dataclass(frozen=True)
class Block:
    """A block, and what a plan says of it.

    Attributes:
        path: within the model.
        leaves: of its linear maps, by their paths in it; None if nobody has planned it.
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
        """Equal for blocks that are split alike."""
        shapes = tuple((name, tuple(p.shape)) for name, p in self.module.named_parameters())
        return type(self.module), shapes, tuple((self.leaves or {}).items()), self.source

    def is_marked(self, path: str) -> bool:
        """Whether a script wants one of its maps to be distributed."""
        return mark_of(self.module.get_submodule(path)).enabled


@dataclass(frozen=True)
class _Choice:
    """What was decided for the blocks of a kind.

    Attributes:
        line: of the log.
        error: why a script's plan cannot be had.
    """

    split: Split
    line: str
    error: str | None = None


def splits(model: nn.Module, group: TensorGroup, is_taken: Callable[[nn.Module], bool]) -> dict[int, Split]:
    """By the ``id`` of each block that is split in place, how; all ranks of the group call it.

    Args:
        is_taken: whether a distributed class stands for a module.

    Raises:
        SMPUserError: a script's plan makes a block compute something else.
    """
    if group.size == 1:
        return {}
    kinds: dict[tuple[object, ...], list[Block]] = {}
    shared = _shared_with_others(model)
    for block in blocks_of(model, is_taken):
        if not shared(block):
            kinds.setdefault(block.kind, []).append(block)
        elif group.rank == 0 and block.leaves is not None:
            logger.warning("%s is not split in place: it shares a weight with another module", _title([block]))
    if not kinds:
        return {}
    # One rank decides, since whether numbers are equal is not for each to find out by itself.
    chosen: list[_Choice] = group.agree(_chosen(model, kinds, group) if group.rank == 0 else None)
    found: dict[int, Split] = {}
    for blocks, choice in zip(kinds.values(), chosen, strict=True):
        if choice.error is not None:
            raise SMPUserError(choice.error)
        if choice.split.leaves or choice.split.tables:
            found |= {id(block.module): choice.split for block in blocks}
    if group.ranks.rank == 0:
        _say(kinds.values(), chosen, group)
    return found


def _say(kinds: Iterable[list[Block]], chosen: Iterable[_Choice], group: TensorGroup) -> None:
    is_any = False
    for blocks, choice in zip(kinds, chosen, strict=True):
        is_split = bool(choice.split.leaves or choice.split.tables)
        is_any = is_any or is_split
        is_lost = blocks[0].leaves is not None and not is_split
        logger.log(logging.WARNING if is_lost else logging.INFO, "%s", choice.line)
    if is_any and group.slices_activations:
        logger.info(
            "optimize is memory, but blocks that are split in place do not slice activations: each rank keeps those of all rows of "
            "the batch of %d ranks, as under optimize: speed; activation checkpointing saves memory here too",
            group.size,
        )


def _chosen(model: nn.Module, kinds: Mapping[tuple[object, ...], list[Block]], group: TensorGroup) -> list[_Choice]:
    firsts = {blocks[0].path: blocks[0].module for blocks in kinds.values()}
    try:
        calls = calls_of(model, firsts)
        return [_choice(blocks, calls.get(blocks[0].path), group) for blocks in kinds.values()]
    except Exception as error:  # the other ranks wait for a decision, and splitting maps one by one is always one
        why = [f"trying it out failed: {type(error).__name__}: {str(error)[:160]}"]
        return [_Choice(Split({}), _line(blocks, Split({}), None, why, group.size)) for blocks in kinds.values()]


def _choice(blocks: list[Block], call: Call | None, group: TensorGroup) -> _Choice:
    """How blocks of one kind are split, and the line of the log that says so."""
    first = blocks[0]
    proof, why = _proof_of(first, call, group)
    units = _planned_units(first) if first.leaves is not None else []
    if proof is not None and not first.is_scripts:  # a plan that gathers may be improved
        inferred = [u for u in inferred_units(first.module, proof.seen) if all(map(first.is_marked, u.leaves))]
        joined = [u for u in units if any(how.joins for how in u.leaves.values())]
        units = [*(u for u in units if u not in joined), *inferred, *joined]
    split = Split({})
    if proof is not None and not first.is_scripts:
        split = _with_experts(proof, first, group)
    if proof is not None:
        split, failed = _grown(proof, first.module, split, units, group.size)
        if failed and first.is_scripts:
            return _Choice(split, "", _wrong_plan(first, failed, group.size))
        if not first.is_scripts:
            left = [path for path in dict(proof.seen) if path not in split.leaves and first.is_marked(path)]
            split, _ = _grown(proof, first.module, split, list(single(first.module, left)), group.size)
        why += [f"{_listed(unit)} {_fate(unit, split)}: {reason}" for unit, reason in failed]
    elif first.is_scripts and group.prescaled:
        split = _together(unit for unit in units if is_divisible(first.module, unit, group.size) is None)
    proven = None if proof is None else proof.dtype
    return _Choice(split, _line(blocks, split, proven, why, group.size))


def _proof_of(block: Block, call: Call | None, group: TensorGroup) -> tuple[Proof | None, list[str]]:
    """What tries splits of a block out, or None and why there is nothing."""
    if call is None:
        return None, ["nothing is known of how it is called"]
    proof, why = None, ""
    for dtype in (torch.float64, torch.float32):
        try:
            proof = Proof(block.module, call, group.size, dtype)
            break
        except Exception as error:  # whatever it raises, it was not called as was thought
            why = why or f"it does not run by itself ({type(error).__name__}: {str(error)[:120]})"
    if proof is None:
        return None, [why]
    if not group.prescaled and not proof.is_by_rows(BATCH):
        return None, ["with a batch per rank: what it takes or returns cannot be told apart by its rows"]
    return proof, []


def _with_experts(proof: Proof, block: Block, group: TensorGroup) -> Split:
    """Of each mixture of experts the first split that is right."""
    split = Split({})
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
                split = proof.of(together)
                break
    return split


def _grown(
    proof: Proof, block: nn.Module, split: Split, units: Sequence[Unit], size: int
) -> tuple[Split, list[tuple[Unit, str]]]:
    """A split with all units, else with those that are right beside what it has; and why the others are not."""
    paths = [path for unit in units for path in unit.leaves]
    if len(set(paths)) == len(paths) and all(is_divisible(block, unit, size) is None for unit in units):
        with contextlib.suppress(NotEqualError):
            return proof.of(_together(units, split)), []
    failed: list[tuple[Unit, str]] = []
    for unit in units:
        if not unit.leaves or unit.leaves.keys() & split.leaves.keys():
            continue
        why = is_divisible(block, unit, size) or ""
        for variant, numbers in variants(block, unit, size):
            try:
                split = proof.of(_together([variant], split, numbers))
                break
            except NotEqualError as error:
                why = why or str(error)[:160]
        else:
            failed.append((unit, why))
    return split, [(unit, why) for unit, why in failed if not unit.leaves.keys() & split.leaves.keys()]


def _together(units: Iterable[Unit], beside: Split | None = None, numbers: Iterable[Number] = ()) -> Split:
    leaves = dict(beside.leaves) if beside is not None else {}
    for unit in units:
        leaves |= unit.leaves
    before = Split({}) if beside is None else beside
    return replace(before, leaves=leaves, numbers=tuple(sorted({*before.numbers, *numbers})))


def _fate(unit: Unit, split: Split) -> str:
    return "are split one by one" if unit.leaves.keys() <= split.leaves.keys() else "stay whole"


def _planned_units(block: Block) -> list[Unit]:
    """Linear maps of one parent are split together or not at all."""
    units: dict[str, dict[str, LinearSplit]] = {}
    for path, how in (block.leaves or {}).items():
        units.setdefault(path.rpartition(".")[0], {})[path] = how
    return [Unit(leaves) for leaves in units.values()]


# -- blocks ------------------------------------------------------------------------------------------------------------


def blocks_of(model: nn.Module, is_taken: Callable[[nn.Module], bool]) -> Iterator[Block]:
    """The blocks of the outermost modules that have a plan, and those that one may be inferred for."""
    pending = [("", model)]
    while pending:
        path, module = pending.pop(0)
        mark = mark_of(module)
        if isinstance(module, DistributedModule) or (mark.enabled and is_taken(module)):
            continue
        found = list(_blocks_of_plan(path, module, mark)) if mark.enabled else []
        if found:
            yield from found
        elif mark.enabled and mark.plan is None and _may_be_inferred(module, is_taken):
            yield Block(path, module)
        else:
            pending += [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]


def _may_be_inferred(module: nn.Module, is_taken: Callable[[nn.Module], bool]) -> bool:
    """Whether it has linear maps to pair, and is no list of blocks nor around one."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict) or sum(map(is_linear, module.modules())) < 2:
        return False
    inside = [part for part in module.modules() if part is not module]
    if is_patched(module) or any(isinstance(part, DistributedModule) or is_taken(part) for part in inside):
        return False
    return not _is_around_blocks(module)


def _is_around_blocks(module: nn.Module) -> bool:
    """Whether lists of blocks lie in it; lists of experts do not count."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    blocks = [part for part in lists if not is_list_of_experts(part)]
    return any(sum(map(is_linear, element.modules())) > 1 for part in blocks for element in part.children())


def _blocks_of_plan(path: str, module: nn.Module, mark: Mark) -> Iterator[Block]:
    if mark.plan is not None:
        plan, source, is_scripts = mark.plan, "the script's plan", True
    else:
        plan, source, is_scripts = getattr(module, "_tp_plan", None) or {}, "the model's own plan", False
        if not isinstance(plan, Mapping):
            return
    leaves = leaves_of_plan(module, plan, is_scripts=is_scripts)
    inside: dict[str, dict[str, LinearSplit]] = {}
    for leaf, how in leaves.items():
        block = _block_of(leaf, plan)
        inside.setdefault(block, {})[leaf[len(block) + 1 :] if block else leaf] = how
    for block, found in inside.items():
        if any(other.startswith(f"{block}.".lstrip(".")) for other in inside if other != block):
            continue  # a head beside the blocks: it is split by itself
        part = module.get_submodule(block)
        if not is_patched(part) and all(mark_of(part.get_submodule(leaf)).enabled for leaf in found):
            yield Block(f"{path}.{block}".strip("."), part, found, source, is_scripts)


def _block_of(leaf: str, plan: Mapping[str, str]) -> str:
    """Up to the first ``*`` of the pattern that it matches; without one, what it is in, or what the plan is for if none has one."""
    for pattern in plan:
        if re.fullmatch(pattern.replace(".", r"\.").replace("*", "[^.]+"), leaf):
            parts = pattern.split(".")
            if "*" not in parts:
                return pattern.rpartition(".")[0] if any("*" in other for other in plan) else ""
            return ".".join(leaf.split(".")[: parts.index("*") + 1])
    raise AssertionError(f"{leaf} is in no pattern of the plan")


def _shared_with_others(model: nn.Module) -> Callable[[Block], bool]:
    uses = parameter_uses(model)

    def shared(block: Block) -> bool:
        times = sum(part is block.module for _, part in model.named_modules(remove_duplicate=False))
        return any(uses[key] > count * times for key, count in parameter_uses(block.module).items())

    return shared


def parameter_uses(module: nn.Module) -> Counter[int]:
    """In how many places each parameter is met, by its id; a module that has several names counts under each."""
    return Counter(
        id(parameter)
        for _, part in module.named_modules(remove_duplicate=False)
        for parameter in part._parameters.values()
        if parameter is not None
    )


# -- words -------------------------------------------------------------------------------------------------------------


def _line(blocks: list[Block], split: Split, proven: torch.dtype | None, why: list[str], size: int) -> str:
    first = blocks[0]
    if not split.leaves and not split.tables:
        said = f"{_title(blocks)}: {first.source}, but not split in place; each linear map is split by itself"
    else:
        said = f"{_title(blocks)}: {first.source}, {len(split.leaves)} of {_linears(first.module)} linear maps"
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


def _wrong_plan(block: Block, failed: list[tuple[Unit, str]], size: int) -> str:
    reasons = [f"{_listed(unit)}: {why}" for unit, why in failed]
    return (
        f"the plan of a {type(block.module).__name__} ({block.path or 'the model'}) over {size} ranks makes it compute something "
        f"else than the whole one: {'; '.join(reasons)}. It was tried with all parts in one process, on random numbers in float64: "
        "colwise maps must be followed by rowwise ones, with only what works on single heads or features between them, and the "
        "ranks must divide the heads; change the plan, or leave it out"
    )


def _is_spread(split: Split) -> bool:
    return any(how.owner is not None for how in split.leaves.values()) or any(
        t.is_spread for t in split.tables.values()
    )


def _listed(unit: Unit) -> str:
    paths = list(unit.leaves)
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")


def _title(blocks: list[Block]) -> str:
    first = blocks[0]
    times = f"{len(blocks)} × " if len(blocks) > 1 else ""
    where = first.path or "the model"
    where += f" to {blocks[-1].path}" if len(blocks) > 1 else ""
    return f"{times}{type(first.module).__name__} ({where})"


def _linears(module: nn.Module) -> int:
    return sum(map(is_linear, module.modules()))


def _share(block: nn.Module, split: Split) -> float:
    """Of a block's parameters, those that are not whole on every rank."""
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
        halved += sum(block.get_submodule(path).get_parameter(name).numel() for name, _, _ in tables.cuts)
    return halved / max(1, total)
