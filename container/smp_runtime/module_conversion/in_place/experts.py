"""Mixtures of experts in a block: either each expert is split over the ranks, or each rank has some experts.

One sum covers all experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from smp_runtime.module_conversion.splitting import BlockSplit
from smp_runtime.nn.split_in_place.linear import LinearSplit, features_of, is_linear, is_transposed
from smp_runtime.nn.split_in_place.tables import Tables

if TYPE_CHECKING:
    import torch

    from smp_runtime.module_conversion.splitting import Number


#: More linear maps than that are no feed forward net.
_MOST_LINEAR = 4


def expert_splits(
    block: nn.Module, seen: Sequence[tuple[str, torch.Tensor]], size: int, *, is_spread: bool
) -> Iterator[tuple[str, list[BlockSplit]]]:
    """Yield the path of each mixture in a block, and the ways to split it, the best first.

    Args:
        seen: the linear maps of a block with what each was called with, in the order of the calls.
        size: number of ranks.
        is_spread: the ranks shall have whole experts, if their number can be divided.
    """
    if not seen:
        return
    width = features_of(block.get_submodule(seen[0][0]))[0]
    for path in _mixtures(block):
        mixture = block.get_submodule(path)
        found: list[BlockSplit] = []
        for spread in (True, False) if is_spread else (False,):
            found += [_placed(path, split) for split in _of_mixture(mixture, width, size, is_spread=spread)]
        yield path, found


def _mixtures(block: nn.Module) -> list[str]:
    """Return the paths of modules around lists of experts, and around modules with parameters of many experts."""
    found: dict[str, None] = {}
    for path, part in block.named_modules():
        if path and _has_experts(part):
            around = path.rpartition(".")[0]
            found[around] = None
    if len(found) > 1:
        # The block itself, with an empty path, is a mixture only if it has no mixture inside.
        found.pop("", None)
    return [path for path in found if not _is_around_others(path, found)]


def _has_experts(part: nn.Module) -> bool:
    return is_list_of_experts(part) or bool(_tables(part))


def _is_around_others(path: str, paths: Iterable[str]) -> bool:
    return any(other.startswith(f"{path}.") for other in paths)


def is_list_of_experts(part: nn.Module) -> bool:
    """Return whether a list has two or more feed forward nets of one kind, with linear maps as direct children.

    Blocks that consist of halves are no experts.
    """
    if not isinstance(part, nn.ModuleList | nn.ModuleDict):
        return False
    children = list(part.children())
    kinds = {type(child) for child in children}
    if len(children) < 2 or len(kinds) > 1:
        return False
    direct = sum(map(is_linear, children[0].children()))
    every = sum(map(is_linear, children[0].modules()))
    return direct == every and 2 <= direct <= _MOST_LINEAR


def _tables(part: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's own parameters of many experts, ``[experts, …, …]``."""
    found = {}
    for name, parameter in part._parameters.items():
        if parameter is not None and parameter.dim() == 3:
            found[name] = parameter
    single = [name for name, parameter in found.items() if parameter.shape[0] == 1]
    # One row among tables of several experts is something else, such as a token of a class.
    if len(single) == 1:
        del found[single[0]]
    return found


def _placed(path: str, split: BlockSplit) -> BlockSplit:
    def full(name: str) -> str:
        return ".".join(filter(None, (path, name)))

    return replace(
        split,
        leaves={full(name): how for name, how in split.leaves.items()},
        numbers=tuple((full(owner), name, value) for owner, name, value in split.numbers),
        tables={full(name): how for name, how in split.tables.items()},
        regions=(path,),
    )


def _of_mixture(mixture: nn.Module, width: int, size: int, *, is_spread: bool) -> Iterator[BlockSplit]:
    spread: dict[str, LinearSplit] | None = {}
    pairs = _pairs(mixture, width)
    if is_spread:
        spread = _spread(mixture, size)
        pairs = _outside_lists(mixture, pairs)
    if spread is None:
        return
    are_divisible = all(_is_divisible(mixture, path, how, size) for path, how in pairs.items())
    if not are_divisible:
        return
    leaves = {**spread, **pairs}
    tables = {path: part for path, part in mixture.named_modules() if _tables(part)}
    if tables:
        yield from _with_tables(mixture, leaves, tables, width, size, is_spread=is_spread)
    elif leaves:
        yield BlockSplit(leaves)


def _is_divisible(mixture: nn.Module, path: str, how: LinearSplit, size: int) -> bool:
    whole = features_of(mixture.get_submodule(path))[how.columns]
    pieces = how.pieces or (whole,)
    return all(piece % size == 0 for piece in pieces)


def _with_tables(
    mixture: nn.Module,
    leaves: dict[str, LinearSplit],
    tables: Mapping[str, nn.Module],
    width: int,
    size: int,
    *,
    is_spread: bool,
) -> Iterator[BlockSplit]:
    """Yield splits of a mixture's linear maps with each way to cut its parameters of many experts."""
    for packed in (False,) if is_spread else (True, False):
        cuts = (_cuts(part, width, size, is_spread=is_spread, is_packed=packed) for part in tables.values())
        for chosen in itertools.product(*cuts):
            found = dict(zip(tables, chosen, strict=True))
            for numbers in _numbers(mixture, found, size):
                yield BlockSplit(leaves, numbers, tables=found)


def _spread(mixture: nn.Module, size: int) -> dict[str, LinearSplit] | None:
    """Return the splits of listed experts' linear maps, with consecutive experts per owner.

    Return None if the ranks do not divide the experts.
    """
    leaves: dict[str, LinearSplit] = {}
    for path, part in mixture.named_modules():
        experts = list(part.named_children()) if is_list_of_experts(part) else []
        if len(experts) % size:
            return None
        for number, (name, expert) in enumerate(experts):
            owner = number // (len(experts) // size)
            for inner, linear in expert.named_modules():
                if is_linear(linear):
                    how = LinearSplit(
                        True, transposed=is_transposed(linear), pieces=features_of(linear)[1:], owner=owner
                    )
                    leaves[".".join(filter(None, (path, name, inner)))] = how
    return leaves


def _pairs(mixture: nn.Module, width: int) -> dict[str, LinearSplit]:
    """Return the splits of linear maps in one module that lead from and to the activations: a feed forward net."""
    found: dict[str, LinearSplit] = {}
    for path, part in mixture.named_modules():
        for name, how in _pairs_in(part, width).items():
            found[f"{path}.{name}".lstrip(".")] = how
    return found


def _outside_lists(mixture: nn.Module, pairs: Mapping[str, LinearSplit]) -> dict[str, LinearSplit]:
    """Return the pairs outside lists of experts: a listed expert has one owner, which keeps it whole."""
    lists = [path for path, part in mixture.named_modules() if is_list_of_experts(part)]
    stems = tuple(f"{path}.".lstrip(".") for path in lists)
    return {path: how for path, how in pairs.items() if not path.startswith(stems)}


def _pairs_in(part: nn.Module, width: int) -> dict[str, LinearSplit]:
    """Return the splits of linear maps among a module's children: those to more features, and the one back."""
    linears = [(name, child) for name, child in part.named_children() if is_linear(child)]
    columns = [(name, child) for name, child in linears if features_of(child)[0] == width]
    rows = [(name, child) for name, child in linears if features_of(child)[1] == width]
    if not rows:
        return {}
    if len(rows) > 1:  # as wide inside as outside: the last one is back
        rows = [linears[-1]]
        columns = linears[:-1]
    inside = {features_of(child)[0] for _, child in rows}
    found = {}
    for name, child in (*columns, *rows):
        features = features_of(child)[1]
        is_column = (name, child) not in rows
        pieces: tuple[int, ...] = ()
        if is_column and features not in inside:
            if features / 2 not in inside:
                continue
            pieces = (features // 2, features // 2)  # two packed maps
        found[name] = LinearSplit(is_column, transposed=is_transposed(child), local=True, pieces=pieces)
    return found


def _cuts(part: nn.Module, width: int, size: int, *, is_spread: bool, is_packed: bool) -> Iterator[Tables]:
    """Yield the ways to cut a module's parameters; there are several if experts are as wide inside as outside."""
    tables = _tables(part)
    experts = {parameter.shape[0] for parameter in tables.values()}
    if len(experts) != 1:
        return
    (count,) = experts
    given = _parameters_of(part, count)
    if not is_spread:
        inside = _inner_length(tables, width)
        yield from _cuts_inside(given, count, width, inside, size, is_packed=is_packed)
    elif count % size == 0:
        yield Tables(tuple((name, 0, ()) for name in given), experts=count)


def _inner_length(tables: Mapping[str, nn.Parameter], width: int) -> int:
    """Return the number of features inside an expert; ``width`` if all lengths are that of the activations."""
    lengths = itertools.chain.from_iterable(parameter.shape[1:] for parameter in tables.values())
    return min((length for length in lengths if length != width), default=width)


def _parameters_of(part: nn.Module, count: int) -> dict[str, nn.Parameter]:
    """Return a module's own parameters with a row for each of ``count`` experts: matrices, and vectors such as biases."""
    found: dict[str, nn.Parameter] = {}
    for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
        has_rows = parameter.dim() > 1
        if has_rows and parameter.shape[0] == count:
            found[name] = parameter
    return found


def _cuts_inside(
    given: Mapping[str, nn.Parameter], count: int, width: int, inside: int, size: int, *, is_packed: bool
) -> Iterator[Tables]:
    """Yield the ways to divide each expert's inner features over the ranks."""
    candidates = [inside]
    # Twice the width may also be two packed maps of experts that are as wide inside as outside.
    if inside == 2 * width:
        candidates.append(width)
    for features in candidates:
        divided = _added_to_results(given, width, features)
        ways = []
        for name, parameter in given.items():
            if name not in divided:
                ways.append(list(_cuts_of(name, parameter, width, features, size, is_packed=is_packed)))
        for cuts in itertools.product(*ways):
            yield Tables(cuts, tuple(divided), count)


def _added_to_results(given: Mapping[str, nn.Parameter], width: int, features: int) -> list[str]:
    """Return the names of the vectors that are added to experts' results: every rank adds a share of these."""
    vectors = []
    for name, parameter in given.items():
        is_vector = parameter.dim() == 2  # one for each expert
        if is_vector and parameter.shape[1] == width:
            vectors.append(name)
    if features != width:
        return vectors
    # Inner vectors are as long here, but they come before the last matrix.
    late = _late(given)
    return [name for name in vectors if name in late]


def _late(given: Mapping[str, nn.Parameter]) -> set[str]:
    """Return the names from the last matrix on; the parameters after it are added to the results."""
    names = list(given)
    last = max(names.index(name) for name, parameter in given.items() if parameter.dim() == 3)
    return set(names[last:])


def _cuts_of(
    name: str, parameter: nn.Parameter, width: int, features: int, size: int, *, is_packed: bool
) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Yield the places where one parameter may be cut, the likelier first."""
    for dim in _dims_to_cut(parameter, width, features):
        length = parameter.shape[dim]
        pieces: tuple[int, ...] = ()
        # A rank needs its part of both packed maps, so each half is divided.
        if is_packed and length == 2 * features:
            pieces = (features, features)
        lengths = pieces or (length,)
        if all(piece % size == 0 for piece in lengths):
            yield name, dim, pieces


def _dims_to_cut(parameter: nn.Parameter, width: int, features: int) -> list[int]:
    lengths = (features, 2 * features)  # one map, or two packed ones
    dims = [dim for dim in range(1, parameter.dim()) if parameter.shape[dim] in lengths]
    if features == width:
        return dims
    inner = dims
    # A matrix has the activations' width along its other dim, which stays whole.
    if parameter.dim() > 2:
        inner = [dim for dim in dims if parameter.shape[dim] != width]
    return (inner or dims)[:1]


def _numbers(mixture: nn.Module, tables: dict[str, Tables], size: int) -> Iterator[tuple[Number, ...]]:
    """Yield sets of numbers of the modules with tables that may become those of one rank."""
    yield ()
    found: list[Number] = []
    for path, how in tables.items():
        part = mixture.get_submodule(path)
        wholes = _divided_lengths(part, how)
        for name, value in _integers_of(part):
            is_named = "expert" in name or not how.is_spread
            if is_named and value in wholes:
                found.append((path, name, value // size))
    if found:
        yield tuple(found)


def _integers_of(part: nn.Module) -> Iterator[tuple[str, int]]:
    for name, value in vars(part).items():
        is_integer = type(value) is int  # neither a bool nor a script's own kind of number
        if is_integer and not name.startswith("_"):
            yield name, value


def _divided_lengths(part: nn.Module, how: Tables) -> set[int]:
    """Return the lengths that the ranks divide: the number of experts, or those along the cuts."""
    lengths: set[int] = set()
    if how.is_spread:
        lengths.add(how.experts)
    else:
        lengths.update(part.get_parameter(name).shape[dim] for name, dim, _ in how.cuts)
    for _, _, pieces in how.cuts:
        lengths.update(pieces)
    return lengths
