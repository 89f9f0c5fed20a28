"""Cases of attention over ranks: sizes, masks and positions by seed, and what one process computes."""

from __future__ import annotations

import contextlib
import itertools
import random
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
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
        "range of documents": None,
        "range of a window": None,
        "range and mask": noise > 0.2,
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
        # Zeros have a gradient, too.
        "learned": numbers[:1, : draw.choice([1, heads])] * draw.choice([0, 1]),
        "learned for all rows": numbers[:1, :, :1],
        "large numbers": torch.zeros(batch, 1, rows, keys, dtype=dtype).masked_fill(
            (key < lengths) | (key > row), hidden
        ),
        "empty blocks": (key // 8 == row // 8) & (row % 5 != 0),
    }[kind]
    if "range" not in kind:
        return made, kind.startswith("causal"), None
    row = row[:, 0]
    if kind == "range of a window":
        ends = draw.choice([row, row + draw.randint(-3, 9)])
        return made, False, ((ends - width).clamp(min=0), ends)
    first = torch.searchsorted(documents[:rows].contiguous(), documents[:rows])
    last = draw.choice([row, torch.searchsorted(documents[:rows].contiguous(), documents[:rows], right=True) - 1])
    return made, draw.random() < 0.5, (first, last)


class _Case(SimpleNamespace):
    """The sizes of an attention."""

    @property
    def grouped(self):
        return self.heads != self.key_heads

    @property
    def learns(self):
        return self.kind.startswith("learned")

    def tensors(self, seed, dtype):
        """Queries, keys and values, and the gradient of the result."""
        made = torch.Generator().manual_seed(seed)
        shapes = [
            (self.batch, self.heads, self.rows, self.width),
            (self.batch, self.key_heads, self.keys, self.width),
            (self.batch, self.key_heads, self.keys, self.value_width),
            (self.batch, self.heads, self.rows, self.value_width),
        ]
        *inputs, above = (torch.randn(shape, generator=made, dtype=torch.float64).to(dtype) for shape in shapes)
        return inputs, above


def _case(seed):
    draw = random.Random(seed)
    kind = MASKS[seed % len(MASKS)]
    causal = kind.startswith("causal")
    rows = draw.randint(4, 60)
    keys = rows if causal or draw.random() < 0.7 else draw.randint(4, 60)  # cross-attention
    heads, key_heads = draw.choice([(4, 4), (4, 2), (4, 1), (6, 3), (3, 3)])
    width = draw.choice([8, 12])
    value_width = width if draw.random() < 0.8 else 5
    return _Case(
        draw=draw, kind=kind, batch=draw.randint(1, 2), rows=rows, keys=keys, heads=heads, key_heads=key_heads, width=width,
        value_width=value_width, scale=draw.choice([None, None, 0.7]),
    )  # fmt: skip


def differences(found, wanted):
    """Yield the largest difference of each pair of tensors, relative to the largest number if that is above 1."""
    for one, other in zip(found, wanted, strict=True):
        yield (one - other).abs().max().item() / max(1.0, other.abs().max().item()) if other.numel() else 0.0


def _visible(case, causal, key_range):
    row, key = torch.arange(case.rows)[:, None], torch.arange(case.keys)
    visible = row >= key if causal else torch.ones(case.rows, case.keys, dtype=torch.bool)
    if key_range:
        visible = visible & (key >= key_range[0][:, None]) & (key <= key_range[1][:, None])
    return visible


def _alone(case, inputs, mask, causal, key_range, above):
    """The result of one process, and the gradients of its inputs and its mask."""
    whole = [each.detach().clone().requires_grad_() for each in inputs]
    learned = None
    if mask is not None and case.learns:
        mask = learned = mask.clone().requires_grad_()
    seen = mask
    if (causal and mask is not None) or key_range:
        visible = _visible(case, causal, key_range)
        mask = torch.ones_like(visible) if mask is None else mask
        seen = mask & visible if mask.dtype is torch.bool else mask.masked_fill(~visible, -torch.inf)
    # PyTorch's operator for the CPU has wrong gradients for rows of large negative numbers only: its log-sum-exp has no digits
    # for the number of keys.
    with sdpa_kernel(SDPBackend.MATH) if case.kind == "large numbers" else contextlib.nullcontext():
        out = F.scaled_dot_product_attention(
            *whole, attn_mask=seen, is_causal=causal and seen is None, scale=case.scale, enable_gqa=case.grouped
        )
    out.backward(above)
    return [out.detach(), *(each.grad for each in whole), *([] if learned is None else [learned.grad])]


def compare(seed, method, dtype, group):
    """The largest difference between this rank's rows and those of one process, in both passes, beside the tolerance."""
    case = _case(seed)
    sizes = (case.batch, case.heads, case.rows, case.keys)
    mask, causal, key_range = _mask(case.kind, case.draw, sizes, dtype)
    inputs, above = case.tensors(seed, dtype)
    queries = _positions(case.draw, case.rows, group.size)
    keys = queries if case.keys == case.rows else _positions(case.draw, case.keys, group.size)
    mine, my_keys = queries[group.rank], keys[group.rank]

    parts = [
        each[:, :, held].clone().requires_grad_() for each, held in zip(inputs, (mine, my_keys, my_keys), strict=True)
    ]
    part_of_mask = mask[..., mine, :] if mask is not None and mask.shape[-2] > 1 else mask
    if case.learns:
        part_of_mask = part_of_mask.clone().requires_grad_()
    out = attend(
        *parts, query_index=queries, key_index=keys, group=group, mask=part_of_mask, causal=causal, key_range=key_range,
        scale=case.scale, method=method, grouped=case.grouped,
    )  # fmt: skip
    out.backward(above[:, :, mine])
    found = [out.detach(), *(each.grad for each in parts)]
    if case.learns:
        of_mask = part_of_mask.grad
        if mask.shape[-2] == 1:  # a bias for all rows has a gradient on each rank; the whole is their sum
            dist.all_reduce(of_mask)
        found.append(of_mask)

    def own(whole):
        rows = [whole[0][:, :, mine], whole[1][:, :, mine], whole[2][:, :, my_keys], whole[3][:, :, my_keys]]
        return rows + [each if mask.shape[-2] == 1 else each[:, :, mine] for each in whole[4:]]

    wanted = own(_alone(case, inputs, mask, causal, key_range, above))
    difference = max(differences(found, wanted))
    if difference > TOLERANCE[dtype] and dtype.itemsize == 2:
        # One process is off as well: no further from the truth than it counts as equal.
        numbers = mask.double() if mask is not None and mask.is_floating_point() else mask
        exact = own(_alone(case, [each.double() for each in inputs], numbers, causal, key_range, above.double()))
        ours, theirs = max(differences(found, exact)), max(differences(wanted, exact))
        difference = difference if ours > 1.5 * theirs else TOLERANCE[dtype]
    return difference


def compare_all(seeds, whole):
    """The differences of some cases, by seed, method and type.

    Of all types if ``whole``. Else a case has one method in a type with fewer digits, and the others in float64.
    """
    group = Group.whole()
    found = {}
    exact, *others = TOLERANCE
    with small_tiles(8, 4):  # short sequences have several tiles, too
        for seed in seeds:
            for number, method in enumerate(METHODS):
                one = exact if (seed + number) % len(METHODS) else others[seed % len(others)]
                for dtype in TOLERANCE if whole else [one]:
                    found[seed, method, dtype] = compare(seed, method, dtype, group)
    return found


@contextlib.contextmanager
def small_tiles(rows, gap):
    """Cut what a mask hides into tiles of fewer rows, and take fewer keys for a gap."""
    before = visibility.TILE_ROWS, plan.GAP
    visibility.TILE_ROWS, plan.GAP = rows, gap
    try:
        yield
    finally:
        visibility.TILE_ROWS, plan.GAP = before


def random_numbers(*shape, seed=0, dtype=torch.float64):
    """Normal numbers by seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def train_once(group, index, inputs, above, **options):
    """Both passes with this rank's rows; returns the result and the gradients."""
    mine = index[group.rank]
    parts = [each[:, :, mine].clone().requires_grad_() for each in inputs]
    out = attend(*parts, query_index=index, key_index=index, group=group, **options)
    out.backward(above[:, :, mine])
    return [out.detach(), *(each.grad for each in parts)]
