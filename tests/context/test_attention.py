"""Attention of ranks that share a sequence out is attention over the whole sequence, under any mask."""

from __future__ import annotations

import contextlib
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import matrix
from support.matrix import sampled
from torch.nn.attention import SDPBackend, sdpa_kernel

from smp_runtime.comm.collectives import TorchCollectives
from smp_runtime.context.attention import METHODS, attend, balance_documents, plan, visibility, zigzag_indices

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
MASKS = [
    *(
        "none",
        "causal",
        "padded",
        "left padded",
        "packed",
        "window",
        "chunked",
        "prefix",
        "random",
        "causal beside random",
    ),
    *(
        "bias",
        "bias of heads",
        "causal beside bias",
        "learned",
        "learned for all rows",
        "large numbers",
        "empty blocks",
    ),
]


class Group(SimpleNamespace):
    """All ranks of a test, or this one alone."""

    __hash__ = object.__hash__

    @classmethod
    def whole(cls):
        world = dist.group.WORLD
        return cls(
            rank=dist.get_rank(), size=dist.get_world_size(), process_group=world, collectives=TorchCollectives()
        )

    @classmethod
    def alone(cls):
        return cls(rank=0, size=1, process_group=None, collectives=None)


def _positions(draw, length, ranks):
    """Each rank's positions: in one of the ways in which sequences are divided."""
    kind = draw.choice(["zigzag", "contiguous", "uneven", "cut", "documents", "scattered"])
    if kind == "zigzag":
        return zigzag_indices(length, ranks)
    if kind == "contiguous":
        return list(torch.arange(length).tensor_split(ranks))
    if kind == "uneven":  # some may have none
        edges = sorted(draw.randint(0, length) for _ in range(ranks - 1))
        return list(torch.arange(length).tensor_split(edges))
    if kind == "cut":  # as ``hidden[:, 3:]`` of a sequence in zig-zag chunks
        return [(held - 3)[held >= 3] for held in zigzag_indices(length + 3, ranks)]
    if kind == "documents":
        return balance_documents(_lengths(draw, length), ranks)
    owners = torch.tensor([draw.randrange(ranks) for _ in range(length)], dtype=torch.int64)
    return [(owners == rank).nonzero()[:, 0] for rank in range(ranks)]


def _lengths(draw, length):
    edges = sorted({0, length, *(draw.randint(0, length) for _ in range(5))})
    return [after - before for before, after in itertools.pairwise(edges)]


def _mask(kind, draw, sizes, dtype):
    """The mask of a whole sequence, and whether the call is causal beside it."""
    batch, heads, rows, keys = sizes
    made = torch.Generator().manual_seed(draw.randrange(2**31))
    row, key = torch.arange(rows)[:, None], torch.arange(keys)
    width = draw.randint(1, max(1, keys // 2))
    documents = torch.zeros(max(rows, keys), dtype=torch.int64)
    for edge in _lengths(draw, max(rows, keys))[:-1]:
        documents[edge:] += 1
    noise = torch.rand(batch, draw.choice([1, heads]), rows, keys, generator=made)
    lengths = torch.tensor([draw.randint(0, keys) for _ in range(batch)])[:, None, None, None]
    numbers = torch.randn(draw.choice([1, batch]), heads, rows, keys, generator=made, dtype=torch.float64).to(dtype)
    hidden = draw.choice([torch.finfo(dtype).min, -1e9 if dtype is torch.float32 else torch.finfo(dtype).min])
    made = {
        "none": None,
        "causal": None,
        "padded": key < lengths,
        "left padded": (key >= lengths) & (key <= row),
        "packed": documents[:rows, None] == documents[:keys],
        "window": (key <= row) & (key > row - width),
        "chunked": (key <= row) & (key // width == row // width),
        "prefix": (key <= row) | (key < width),
        "random": noise > draw.choice([0.1, 0.5, 0.95]),
        "causal beside random": noise > 0.3,
        "bias": -0.3 * (row - key).abs().to(dtype),
        "bias of heads": numbers.masked_fill(noise[:1, :1] > 0.8, -torch.inf),
        "causal beside bias": numbers[:1],
        "learned": numbers[:1],
        "learned for all rows": numbers[:1, :, :1],
        "large numbers": torch.zeros(batch, 1, rows, keys, dtype=dtype).masked_fill(
            (key < lengths) | (key > row), hidden
        ),
        "empty blocks": (key // 8 == row // 8) & (row % 5 != 0),
    }[kind]
    return made, kind.startswith("causal")


def _case(seed):
    draw = random.Random(seed)
    kind = MASKS[seed % len(MASKS)]
    causal = kind.startswith("causal")
    rows = draw.randint(4, 60)
    keys = rows if causal or draw.random() < 0.7 else draw.randint(4, 60)  # cross-attention
    heads, key_heads = draw.choice([(4, 4), (4, 2), (4, 1), (6, 3), (3, 3)])
    width = draw.choice([8, 12])
    value_width = width if draw.random() < 0.8 else 5
    return SimpleNamespace(
        draw=draw, kind=kind, batch=draw.randint(1, 2), rows=rows, keys=keys, heads=heads, key_heads=key_heads, width=width,
        value_width=value_width, scale=draw.choice([None, None, 0.7]),
    )  # fmt: skip


def _differences(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        yield (one - other).abs().max().item() / max(1.0, other.abs().max().item()) if other.numel() else 0.0


def _compare(seed, method, dtype, group):
    """The largest difference between this rank's rows and those of one process, in both passes."""
    case = _case(seed)
    sizes = (case.batch, case.heads, case.rows, case.keys)
    mask, causal = _mask(case.kind, case.draw, sizes, dtype)
    made = torch.Generator().manual_seed(seed)
    shapes = [
        (case.batch, case.heads, case.rows, case.width),
        (case.batch, case.key_heads, case.keys, case.width),
        (case.batch, case.key_heads, case.keys, case.value_width),
        (case.batch, case.heads, case.rows, case.value_width),
    ]
    q, k, v, above = (torch.randn(shape, generator=made, dtype=torch.float64).to(dtype) for shape in shapes)
    queries = _positions(case.draw, case.rows, group.size)
    keys = queries if case.keys == case.rows else _positions(case.draw, case.keys, group.size)
    mine, my_keys = queries[group.rank], keys[group.rank]
    learns = case.kind.startswith("learned")

    whole = [each.clone().requires_grad_() for each in (q, k, v)]
    whole_mask = mask.clone().requires_grad_(learns) if mask is not None else None
    seen = whole_mask
    if causal and mask is not None:
        visible = torch.arange(case.rows)[:, None] >= torch.arange(case.keys)
        seen = mask & visible if mask.dtype is torch.bool else whole_mask.masked_fill(~visible, -torch.inf)
    grouped = case.heads != case.key_heads
    # PyTorch's operator for the CPU has wrong gradients for rows of large negative numbers only: its log-sum-exp has no digits
    # for the number of keys.
    with sdpa_kernel(SDPBackend.MATH) if case.kind == "large numbers" else contextlib.nullcontext():
        wanted = F.scaled_dot_product_attention(
            *whole, attn_mask=seen, is_causal=causal and mask is None, scale=case.scale, enable_gqa=grouped
        )
    wanted.backward(above)

    parts = [each[:, :, held].clone().requires_grad_() for each, held in ((q, mine), (k, my_keys), (v, my_keys))]
    part_of_mask = mask
    if mask is not None and mask.shape[-2] > 1:
        part_of_mask = mask[..., mine, :]
    if learns:
        part_of_mask = part_of_mask.clone().requires_grad_()
    out = attend(
        *parts, query_index=queries, key_index=keys, group=group, mask=part_of_mask, causal=causal, scale=case.scale,
        method=method, grouped=grouped,
    )  # fmt: skip
    out.backward(above[:, :, mine])
    found = [out.detach(), *(each.grad for each in parts)]
    expected = [wanted.detach()[:, :, mine], whole[0].grad[:, :, mine]]
    expected += [each.grad[:, :, my_keys] for each in whole[1:]]
    if learns:
        of_mask = part_of_mask.grad
        if mask.shape[-2] == 1:  # a bias for all rows has a gradient on each rank; the whole is their sum
            dist.all_reduce(of_mask)
            expected.append(whole_mask.grad)
        else:
            expected.append(whole_mask.grad[:, :, mine])
        found.append(of_mask)
    return max(_differences(found, expected))


def _compare_all(seeds, whole):
    visibility.TILE_ROWS, plan.GAP = 8, 4  # short sequences have several tiles, too
    group = Group.whole()
    found = {}
    for seed in seeds:
        for number, method in enumerate(METHODS):
            some = {torch.float64, list(TOLERANCE)[(seed + number) % len(TOLERANCE)]}
            for dtype in TOLERANCE if whole else some:
                found[seed, method, dtype] = _compare(seed, method, dtype, group)
    return found


CASES = [(ranks, seed) for ranks in (2, 3, 4) for seed in range(0, 300, 20)]


@pytest.mark.parametrize(("size", "first"), sampled(CASES, [(4, 0)]))
def test_attention_over_ranks_is_attention_over_the_whole(ranks, size, first):
    for results in ranks(_compare_all, size, range(first, first + 20), matrix.is_whole, timeout=600):
        for (seed, method, dtype), difference in results.items():
            assert difference <= TOLERANCE[dtype], (_case(seed), seed, method, dtype, difference)
