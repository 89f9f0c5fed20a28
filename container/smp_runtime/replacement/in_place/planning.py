"""Which blocks of a model are split in place, and how: by the script's plan, the model's own, or what can be inferred."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.nn.planned import LinearSplit, features_of, is_linear
from smp_runtime.replacement.in_place.capture import calls_of
from smp_runtime.replacement.in_place.proof import Call, NotEqualError, Proof
from smp_runtime.replacement.in_place.splitting import Split
from smp_runtime.replacement.in_place.styles import leaves_of_plan
from smp_runtime.replacement.scopes import Mark, mark_of

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.tensor_parallel.group import TensorGroup

logger = logging.getLogger("smp")


@dataclass(frozen=True)
class Block:
    """A block, and what a plan says of it.

    Attributes:
        path: within the model.
        leaves: of its linear maps, by their paths in it.
        source: where the plan comes from, for the log.
        is_scripts: the script wrote it.
    """

    path: str
    module: nn.Module
    leaves: Mapping[str, LinearSplit]
    source: str
    is_scripts: bool = False

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for blocks that are split alike."""
        shapes = tuple((name, tuple(p.shape)) for name, p in self.module.named_parameters())
        return type(self.module), shapes, tuple(self.leaves.items()), self.source


def splits(model: nn.Module, group: TensorGroup, is_taken: Callable[[nn.Module], bool]) -> dict[int, Split]:
    """By the ``id`` of each block that is split in place, how; all ranks of the group call it.

    Args:
        is_taken: whether a distributed class stands for a module.
    """
    if group.size == 1:
        return {}
    kinds: dict[tuple[object, ...], list[Block]] = {}
    shared = _shared_with_others(model)
    for block in _blocks(model, is_taken):
        if not shared(block):
            kinds.setdefault(block.kind, []).append(block)
        elif group.rank == 0:
            logger.warning("%s is not split in place: it shares a weight with another module", _title([block]))
    if not kinds:
        return {}
    # One rank decides, since whether numbers are equal is not for each to find out by itself.
    chosen = group.agree(_chosen(model, kinds, group) if group.rank == 0 else None)
    found: dict[int, Split] = {}
    for blocks, (split, line) in zip(kinds.values(), chosen, strict=True):
        if group.ranks.rank == 0:
            logger.info("%s", line)
        if split.leaves:
            found |= {id(block.module): split for block in blocks}
        elif group.ranks.rank == 0:
            logger.warning("%s", line)
    return found


def _chosen(
    model: nn.Module, kinds: Mapping[tuple[object, ...], list[Block]], group: TensorGroup
) -> list[tuple[Split, str]]:
    firsts = {blocks[0].path: blocks[0] for blocks in kinds.values()}
    calls = calls_of(model, {path: block.module for path, block in firsts.items()})
    return [_choice(blocks, calls.get(blocks[0].path), group.size) for blocks in kinds.values()]


def _choice(blocks: list[Block], call: Call | None, size: int) -> tuple[Split, str]:
    """How blocks of one kind are split, and the line of the log that says so."""
    first = blocks[0]
    units, why = _divisible(first, size)
    split, proof = Split({path: how for unit in units for path, how in unit.items()}), None
    if call is not None and units:
        try:
            proof = Proof(first.module, call, size)
        except Exception as error:
            why.append(f"not proven, since it does not run by itself ({type(error).__name__})")
    if proof is not None:
        split, failed = _largest_proven(proof, units)
        why += failed
    elif units and call is None:
        why.append("not proven, since nothing is known of how it is called")
    share = _share(first.module, split, size)
    said = f"{_title(blocks)}: {first.source}, {len(split.leaves)} of {_linears(first.module)} linear maps"
    said += f", {share:.0%} of its parameters are split" + ("; proven in float64" if proof and split.leaves else "")
    return split, said + (f" ({'; '.join(why)})" if why else "")


def _largest_proven(proof: Proof, units: list[dict[str, LinearSplit]]) -> tuple[Split, list[str]]:
    """All units together, else those that are right by themselves."""
    try:
        return proof.of(_together(units)), []
    except NotEqualError as error:
        whole = str(error)
    good, failed = [], []
    for unit in units:
        try:
            proof.of(_together([unit]))
        except NotEqualError as error:
            failed.append(f"{', '.join(unit)} stays whole: {error}")
        else:
            good.append(unit)
    if not good:
        return Split({}), failed
    try:
        return proof.of(_together(good)), failed
    except NotEqualError as error:
        return Split({}), [f"all together: {whole}", f"without those that fail alone: {error}"]


def _together(units: Iterable[Mapping[str, LinearSplit]]) -> Split:
    return Split({path: how for unit in units for path, how in unit.items()})


def _divisible(block: Block, size: int) -> tuple[list[dict[str, LinearSplit]], list[str]]:
    """The linear maps in units that are split together or not at all: those of one parent; and which cannot be."""
    units: dict[str, dict[str, LinearSplit]] = {}
    for path, how in block.leaves.items():
        units.setdefault(path.rpartition(".")[0], {})[path] = how
    good, why = [], []
    for unit in units.values():
        odd = [path for path, how in unit.items() if _shared_out(block.module.get_submodule(path), how) % size]
        if odd:
            features = _shared_out(block.module.get_submodule(odd[0]), unit[odd[0]])
            why.append(f"{', '.join(unit)} stays whole: {features} features of {odd[0]} over {size} ranks")
        else:
            good.append(unit)
    return good, why


def _shared_out(linear: nn.Module, how: LinearSplit) -> int:
    return features_of(linear)[int(how.columns)]


# -- blocks ------------------------------------------------------------------------------------------------------------


def _blocks(model: nn.Module, is_taken: Callable[[nn.Module], bool]) -> Iterator[Block]:
    """The blocks of the outermost modules that have a plan."""
    pending = [("", model)]
    while pending:
        path, module = pending.pop(0)
        mark = mark_of(module)
        if isinstance(module, DistributedModule) or (mark.enabled and is_taken(module)):
            continue
        found = list(_blocks_of_plan(path, module, mark)) if mark.enabled else []
        if found:
            yield from found
        else:
            pending += [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]


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
        if block is not None:
            inside.setdefault(block, {})[leaf[len(block) + 1 :] if block else leaf] = how
    for block, found in inside.items():
        part = module.get_submodule(block)
        if all(mark_of(part.get_submodule(leaf)).enabled for leaf in found):
            yield Block(f"{path}.{block}".strip("."), part, found, source, is_scripts)


def _block_of(leaf: str, plan: Mapping[str, str]) -> str | None:
    """Up to the first ``*`` of the pattern that it matches; without one, the module that the plan is for."""
    for pattern in plan:
        if re.fullmatch(pattern.replace(".", r"\.").replace("*", "[^.]+"), leaf):
            parts = pattern.split(".")
            if "*" not in parts:
                return "" if "." in pattern or not any("*" in p for p in plan) else None
            return ".".join(leaf.split(".")[: parts.index("*") + 1])
    raise AssertionError(f"{leaf} is in no pattern of the plan")


def _shared_with_others(model: nn.Module) -> Callable[[Block], bool]:
    uses = _uses(model)

    def shared(block: Block) -> bool:
        times = sum(part is block.module for _, part in model.named_modules(remove_duplicate=False))
        return any(uses[key] > count * times for key, count in _uses(block.module).items())

    return shared


def _uses(module: nn.Module) -> Counter[int]:
    return Counter(
        id(parameter)
        for _, part in module.named_modules(remove_duplicate=False)
        for parameter in part._parameters.values()
        if parameter is not None
    )


# -- words -------------------------------------------------------------------------------------------------------------


def _title(blocks: list[Block]) -> str:
    first = blocks[0]
    times = f"{len(blocks)} × " if len(blocks) > 1 else ""
    where = first.path or "the model"
    where += f" to {blocks[-1].path}" if len(blocks) > 1 else ""
    return f"{times}{type(first.module).__name__} ({where})"


def _linears(module: nn.Module) -> int:
    return sum(map(is_linear, module.modules()))


def _share(block: nn.Module, split: Split, size: int) -> float:
    """Of a block's parameters, those that are not whole on every rank."""
    total = sum(p.numel() for p in block.parameters())
    halved = 0
    for path, how in split.leaves.items():
        linear = block.get_submodule(path)
        halved += linear.weight.numel()
        if how.columns and linear.bias is not None:
            halved += linear.bias.numel()
    return halved / max(1, total)
