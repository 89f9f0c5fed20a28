"""Matrix products: rows stay cut; a product over positions is summed over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from smp_runtime.context.rules.pointwise import align
from smp_runtime.context.sequence import ShardedSequence, rule


@rule("linear", "F.linear", "bilinear_off")
def _project(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rest = dict(kwargs)
    sequence = args[0] if args else rest.pop("input")
    weights = (*args[1:], *rest.values())
    if not isinstance(sequence, ShardedSequence):
        return NotImplemented
    if any(isinstance(weight, ShardedSequence) for weight in weights):
        return NotImplemented
    if sequence.dim_held == sequence.dim() - 1:
        return NotImplemented
    return sequence.like(func(sequence.local, *args[1:], **rest))


@rule("matmul", "bmm", "mm", "__matmul__", "__rmatmul__")
def _multiply(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2 or any(factor.dim() < 2 for factor in args):
        return NotImplemented
    left, right = reversed(args) if func.__name__ == "__rmatmul__" else args
    count = max(left.dim(), right.dim())
    letters = [chr(ord("a") + place) for place in range(count - 2)]
    one = [*letters[len(letters) - left.dim() + 2 :], "y", "z"]
    other = [*letters[len(letters) - right.dim() + 2 :], "z", "x"]
    return contract([left, right], [one, other], [*letters, "y", "x"], lambda parts: torch.matmul(*parts))


@rule("einsum")
def _sum_products(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or not isinstance(args[0], str) or "..." in args[0] or "->" not in args[0]:
        return NotImplemented
    equation = args[0].replace(" ", "")
    factors = list(args[1]) if len(args) == 2 and isinstance(args[1], list | tuple) else list(args[1:])
    inputs, _, output = equation.partition("->")
    letters = [list(one) for one in inputs.split(",")]
    if any(len(set(one)) != len(one) for one in letters):
        return NotImplemented
    return contract(factors, letters, list(output), lambda parts: torch.einsum(equation, *parts))


def contract(
    factors: list[torch.Tensor],
    letters: list[list[str]],
    output: list[str],
    compute: Callable[[list[torch.Tensor]], torch.Tensor],
) -> Any:
    """Compute a product whose dims have letters, as ``torch.einsum`` gives them.

    The sequence that stays cut is the first one with a letter in the output; other sequences are gathered, if they are not cut
    at the same letter.
    """
    cut = {
        index: letters[index][factor.dim_held]
        for index, factor in enumerate(factors)
        if isinstance(factor, ShardedSequence)
    }
    kept = [index for index, letter in cut.items() if letter in output]
    chosen = kept[0] if kept else next(iter(cut))
    letter, first = cut[chosen], factors[chosen]
    if not isinstance(first, ShardedSequence):
        raise AssertionError("only sequences are cut")
    parts = []
    for factor, own in zip(factors, letters, strict=True):
        if letter in own:
            parts.append(align(factor, first.sequence_layout, own.index(letter) - len(own), first, "matmul"))
        else:
            parts.append(factor.whole("matmul") if isinstance(factor, ShardedSequence) else factor)
    result = compute(parts)
    if letter not in output:
        return first.group.sum(result)
    return first.like(result, output.index(letter))


_ADDED = {"baddbmm": ("input", "batch1", "batch2"), "addmm": ("input", "mat1", "mat2")}


@rule(*_ADDED)
def _multiply_and_add(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {"beta": 1, "alpha": 1, **dict(zip(_ADDED[func.__name__], args, strict=False)), **kwargs}
    if len(args) > 3 or len(given) != 5:
        return NotImplemented
    added, left, right = (given[name] for name in _ADDED[func.__name__])
    product = torch.matmul(left, right)
    if given["alpha"] != 1:
        product = product * given["alpha"]
    # PyTorch does not read what it multiplies by zero, which may be uninitialized.
    if given["beta"] == 0:
        return product
    return product + (added if given["beta"] == 1 else added * given["beta"])
