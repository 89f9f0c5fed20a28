"""Each operation on a sequence that ranks share out gives the values and gradients of the whole, with or without a rule."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support.ranks.context_threads import assert_equal_to_alone, cut, run_context, whole_of
from torch.nn.attention import SDPBackend, sdpa_kernel

from smp_runtime.context.inputs import SequenceInputs
from smp_runtime.context.sequence import ShardedSequence
from smp_runtime.errors import SMPUserError

B, T, D = 2, 11, 6


def _given():
    """Two sequences, ``[B, T, D]``, targets and whole tensors of other shapes."""
    random = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    return {
        "x": draw(B, T, D),
        "y": draw(B, T, D),
        "w": draw(D, D),
        "p": draw(T, D),
        "s": draw(D),
        "m": torch.arange(B * T).view(B, T) % 3 > 0,
        "n": torch.arange(B * T).view(B, T) % D,
        "tri": torch.ones(T, T, dtype=torch.bool).tril(),
    }


def _heads(x):
    return x.view(B, T, 2, D // 2).transpose(1, 2)


def _set(x, index, value):
    x = x.clone()
    x[index] = value
    return x


def _add_in_place(x, y):
    x = x.clone()
    x += y
    x.mul_(2)[:, :, 1:3].add_(1)
    return x


def _add_to_positions(x, y):
    x = x.clone()
    x[:, 1:] += y[:, :-1]
    x[:, 0] *= 2
    rest = x[:, 2:]
    rest *= 3  # x is not used again
    return rest


def _converted(x):
    return x.to(x.dtype, copy=True)


def _several_in_place(x):
    x = x * 1
    torch._foreach_mul_([x], 2.0)
    data = x.detach().clone()
    data.data = x.detach() * 3
    return x * data


def _shift(n):
    shifted = n.new_zeros(n.shape)
    shifted[:, 1:] = n[:, :-1].clone()
    return shifted


@functools.cache  # before there are threads, which have one generator of random numbers
def _attention_layer():
    torch.manual_seed(2)
    return torch.nn.MultiheadAttention(D, 2, batch_first=True, dtype=torch.float64).requires_grad_(False)


@functools.cache
def _encoder_layer():
    torch.manual_seed(2)
    layer = torch.nn.TransformerEncoderLayer(D, 2, 2 * D, 0.0, batch_first=True, dtype=torch.float64)
    return layer.requires_grad_(False)


def _convolve(x, w, width, ends=(0, 0), groups=1, **options):
    """Convolve along positions, with a weight of ``width`` made of ``w``."""
    weight = torch.stack([w[:, : D // groups] * (place + 1) for place in range(width)], -1)
    return F.conv1d(F.pad(x.transpose(1, 2), ends), weight, w[0], groups=groups, **options)


CONVOLUTIONS = {
    "convolution": lambda x, w, **_: _convolve(x, w, 3, padding=1),
    "causal convolution": lambda x, w, **_: _convolve(x, w, 4, padding=3, groups=D)[..., :T].transpose(1, 2) + x,
    "causal convolution padded before": lambda x, w, **_: _convolve(x, w, 4, (3, 0)).transpose(1, 2) * x,
    "convolution without padding": lambda x, w, **_: _convolve(x, w, 3),
    "convolution of the same length": lambda x, w, **_: _convolve(x, w, 4, padding="same", dilation=2),
    "convolution of one position": lambda x, w, **_: _convolve(x, w, 1),
    "convolution with steps": lambda x, w, **_: _convolve(x, w, 3, padding=2, stride=2),
    "wide convolution": lambda x, w, **_: _convolve(x, w, 6, padding=5, dilation=2),
    "convolution of a slice": lambda x, w, **_: _convolve(x[:, 1:-1], w, 3, padding=1).transpose(1, 2) + x[:, 1:-1],
}

#: Operations that need nothing of other ranks, or only sums, or few positions.
LOCAL = {
    "add": lambda x, y, **_: x + y * 2 - 1,
    "broadcast": lambda x, p, s, **_: x * p + s,
    "broadcast to more dims": lambda x, p, **_: p * x[:, None],
    "compare": lambda x, y, **_: torch.where(x > y, x, y.exp()),
    "mask": lambda x, m, **_: x.masked_fill(m[..., None], 0.5),
    "activations": lambda x, **_: F.gelu(x) + F.silu(x) + x.relu() + torch.tanh(x) + F.softplus(x) + x.sigmoid(),
    "linear": lambda x, w, s, **_: F.linear(x, w, s),
    "matmul right": lambda x, w, **_: x @ w,
    "matmul left": lambda x, w, **_: w @ x.transpose(1, 2),
    "einsum": lambda x, w, **_: torch.einsum("btd,de->bet", x, w),
    "product over positions": lambda x, y, **_: x.transpose(1, 2) @ y,
    "einsum over positions": lambda x, y, **_: torch.einsum("btd,bte->de", x, y),
    "norm": lambda x, s, **_: F.layer_norm(x, (D,), s) + F.rms_norm(x, (D,)),
    "softmax": lambda x, **_: x.softmax(-1) + F.log_softmax(x, dim=2),
    "cumsum of features": lambda x, **_: x.cumsum(-1),
    "view heads": lambda x, **_: _heads(x),
    "view flat": lambda x, **_: x.reshape(-1, D),
    "view flat and back": lambda x, **_: (x.view(B * T, D) * 2).view(B, T, D),
    "merge features": lambda x, **_: _heads(x).transpose(1, 2).flatten(2),
    "merge all": lambda x, **_: x.flatten(),
    "permute": lambda x, **_: x.permute(2, 0, 1),
    "unsqueeze": lambda x, **_: x.unsqueeze(1).unsqueeze(-1).squeeze(1),
    "expand": lambda x, **_: x[:, None].expand(B, 3, T, D),
    "repeat features": lambda x, **_: x.repeat(1, 1, 2),
    "repeat heads": lambda x, **_: _heads(x).repeat_interleave(2, dim=1),
    "split": lambda x, **_: [part * 2 for part in x.split(2, dim=-1)],
    "chunk": lambda x, **_: list(x.chunk(3, -1)),
    "unbind": lambda x, **_: list(x.unbind(0)),
    "cat": lambda x, y, **_: torch.cat([x, y, x], dim=-1),
    "stack": lambda x, y, **_: torch.stack([x, y], dim=1),
    "cat whole": lambda x, p, **_: torch.cat([x, p.expand(B, T, D)], dim=2),
    "pad features": lambda x, **_: F.pad(x, (1, 2)),
    "pad positions": lambda x, **_: F.pad(x, (0, 0, 1, 2)),
    "pad and shift": lambda x, **_: [x - F.pad(x, (0, 0, 1, -1), value=0.5), F.pad(x, (1, 0, -2, 3), "constant", 2.0)],
    "two layouts": lambda x, y, **_: x[:, 1:] * y[:, :-1],
    "two layouts and dims": lambda x, m, **_: torch.where(
        m[:, None, 2:, None], _heads(x)[:, :, 1:-1], _heads(x)[:, :, :-2]
    ),
    "loss of the next word": lambda x, n, **_: F.cross_entropy(x[:, :-1].reshape(-1, D), n[:, 1:].reshape(-1)),
    "loss of padded labels": lambda x, n, **_: F.cross_entropy(
        x.view(-1, D), F.pad(n, (0, 1), value=-100)[..., 1:].contiguous().view(-1), ignore_index=-100
    ),
    "index features": lambda x, **_: x[..., 1:4],
    "chosen features": lambda x, **_: [x[..., [0, 2]], x[:, :, torch.tensor([1, -1])], _heads(x)[:, [1]]],
    "pairs": lambda x, **_: torch.view_as_real(torch.view_as_complex(x.view(B, T, D // 2, 2)) * 1j).flatten(-2),
    "axis of NumPy": lambda x, **_: x.sum(axis=2, keepdims=True) + x.mean(axis=-1)[..., None],
    "axis of positions": lambda x, **_: torch.sum(x, axis=1),
    "new dim": lambda x, **_: x[:, None, :, None],
    "first position": lambda x, **_: x[:, 0],
    "last position": lambda x, **_: x[:, -1, 2:],
    "slice of positions": lambda x, **_: x[:, 1:-2] * 3,
    "every second": lambda x, **_: x[:, ::2],
    "shifted slices": lambda x, **_: x[:, 3:].sum(-1),
    "sum": lambda x, **_: x.sum(),
    "sum over positions": lambda x, **_: x.sum(1, keepdim=True) * x,
    "mean over positions": lambda x, **_: x.mean(dim=1),
    "mean": lambda x, **_: torch.mean(x * x),
    "any": lambda m, x, **_: (x > 2).any() & (x < 3).all(),
    "largest feature": lambda x, **_: [x.max(-1).values, x.amax(2), x.argmax(-1)],
    "norm of features": lambda x, **_: F.normalize(x, dim=-1) + x.norm(dim=-1, keepdim=True),
    "embedding": lambda n, w, **_: F.embedding(n, w),
    "conversions": lambda x, **_: x.float().to(torch.float64).type_as(x),
    "loss": lambda x, n, **_: F.cross_entropy(x.view(-1, D), n.view(-1)),
    "loss with classes first": lambda x, n, **_: F.cross_entropy(x.transpose(1, 2), n, ignore_index=2),
    "weighted loss": lambda x, n, s, **_: F.cross_entropy(
        x.view(-1, D), n.view(-1), s.detach().abs(), label_smoothing=0.1
    ),
    "sum of losses": lambda x, n, **_: F.cross_entropy(x.flatten(0, 1), n.flatten(), reduction="sum") / 7,
    "losses": lambda x, n, **_: F.cross_entropy(x.view(-1, D), n.view(-1), reduction="none").view(B, T),
    "likelihood": lambda x, n, **_: F.nll_loss(F.log_softmax(x, -1).view(-1, D), n.view(-1)),
    "squares": lambda x, y, **_: F.mse_loss(x, y) + F.smooth_l1_loss(x, y, reduction="sum"),
    "divergence": lambda x, y, **_: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "set classes": lambda x, y, n, **_: (
        x.scatter(-1, n[..., None], y[..., :1])
        + torch.zeros(B, T, D).double().scatter(2, n[..., None], x[..., :1])
        + x.clone().scatter_add_(2, n[..., None], y[..., :1])
        + torch.scatter(x, -1, n[..., None], 0.5)
    ),
    "norm with its defaults": lambda x, **_: torch.norm(x, p=1, dim=-1, keepdim=True),
    "two slices that follow": lambda x, **_: (
        torch.cat([x[:, :3] * 2, x[:, 3:4], x[:, 4:]], 1) + torch.cat([x[:, 1:5], x[:, 5:]], 1).sum(1, keepdim=True)
    ),
    "two beside whole ones": lambda x, y, p, **_: (
        torch.cat([p[None, :2].expand(B, 2, D), x[:, :-3], p[None, :1].expand(B, 1, D)], 1) * y
    ),
    "chosen classes": lambda x, n, **_: x.gather(-1, n[..., None]).squeeze(-1),
    "in place": lambda x, y, **_: _add_in_place(x, y),
    "set features": lambda x, **_: _set(x, (slice(None), slice(None), slice(0, 2)), 0.0),
    "addmm": lambda x, w, s, **_: torch.addmm(s, x.view(-1, D), w),
    "scores": lambda x, y, **_: _heads(x) * 0.5,
    "near cumsum": lambda x, n, **_: [x.cumsum(1), (n > 2).int().cumsum(dim=1), x.transpose(1, 2).cumsum(-1)],
    "near cumsum of slices": lambda x, n, **_: [
        x[:, 2:].cumsum(1),
        x[:, ::2].cumsum(1),
        F.pad(x, (0, 0, 2, 1)).cumsum(1),
    ],
    "near set positions": lambda x, y, **_: _set(x, (slice(None), slice(1, 4)), y[:, 2:5]),
    "near set a position": lambda x, p, **_: _set(_set(x, (slice(None), -2), p[3]), (0, 4, slice(1, 3)), 7.0),
    "near set rows": lambda x, p, **_: _set(x, (slice(None), slice(2, None, 3)), p[2::3]),
    "near set mask": lambda x, m, **_: [_set(x[..., 1], m, 2.0), _set(x, x > 1, torch.tensor(0.5, dtype=x.dtype))],
    "near shift": lambda n, **_: _shift(n),
    "near shift with a start": lambda n, **_: _set(_shift(n), (slice(None), 0), 5),
    "near first and last": lambda x, n, **_: [x[:, [0, -1]], n[:, [-1, 0]] + 0.0],
    "near chosen by sample": lambda x, n, **_: [
        n.gather(1, torch.tensor([[3, 9], [0, 10]])) + 0.0,
        x.gather(1, torch.tensor([[[3]], [[10]]]).expand(B, 1, D)),
    ],
    "near table": lambda n, w, p, **_: [
        w[n],
        w.index_select(0, n.view(-1)),
        p[:, 0].expand(B, T).gather(1, n),
    ],
    "near add to positions": lambda x, y, **_: _add_to_positions(x, y),
    "near loss of converted scores": lambda x, n, **_: [
        F.cross_entropy(_converted(x).view(-1, D), n.view(-1), ignore_index=2),
        F.cross_entropy(_converted(x).view(-1, D), n.view(-1), reduction="sum", label_smoothing=0.1),
    ],
    "near few rows": lambda x, y, **_: [
        F.scaled_dot_product_attention(x[:, :3], y, y),
        F.scaled_dot_product_attention(x, y[:, :2], y[:, :2]),
    ],
    **{f"near {name}": operation for name, operation in CONVOLUTIONS.items()},
}

#: Operations that gather whole sequences.
GATHERING = {
    "one position beside all": lambda x, y, **_: [x[:, -1:] - x, x * y[:, 2:3], torch.where(x[:, :1] > 0, x, y)],
    "one position beside more that are whole": lambda x, p, **_: x[:, :1] * p,
    "one position becomes many": lambda x, y, **_: [
        x[:, :1].expand(-1, T, -1).sum(1),
        x[:, 2:3].expand(B, 5, D) * 2,
        x[:, -1:].expand_as(y).sum(1),
    ],
    "numbers and how often they occur": lambda n, w, **_: F.embedding(n, w, scale_grad_by_freq=True),
    "rows of a limited norm": lambda n, w, **_: F.embedding(n, w.detach(), max_norm=1.0).norm() * w.norm(),
    "several in place": lambda x, **_: _several_in_place(x),
    "flip": lambda x, **_: x.flip(1),
    "flip of two dims": lambda x, **_: x.flip(2, 1),
    "roll": lambda x, **_: torch.roll(x, 1, 1),
    "largest position": lambda x, **_: x.max(1).values,
    "spread": lambda x, **_: x.std(1) + x.var(),
    "softmax over positions": lambda x, **_: x.softmax(1),
    "scores of pairs": lambda x, y, **_: x @ y.transpose(1, 2),
    "attention by hand": lambda x, y, tri, **_: (x @ y.mT).masked_fill(~tri, -1e9).softmax(-1) @ x,
    "outer": lambda x, y, **_: x.sum(-1)[:, :, None] - y.sum(-1)[:, None],
    "choose by mask": lambda x, m, **_: x[m],
    "choose by numbers": lambda x, **_: x[torch.arange(B), torch.tensor([2, 5])],
    "slices that do not follow": lambda x, **_: torch.cat([x[:, :3], x[:, 5:]], 1),
    "sums at other positions": lambda x, y, n, **_: x.scatter_add(1, n[..., None].expand(B, T, D), y),
    "cat of positions": lambda x, y, **_: torch.cat([x, y], dim=1),
    "split positions": lambda x, **_: list(x.split(4, dim=1)),
    "chunked view": lambda x, **_: x.view(B, 1, T, D).reshape(B * D, T),
    "sort": lambda x, **_: x.sort(1).values,
    "group norm": lambda x, **_: F.group_norm(x.transpose(1, 2), 2),
    "attention": lambda x, y, **_: F.scaled_dot_product_attention(_heads(x), _heads(y), _heads(x), is_causal=True),
    "masked attention": lambda x, y, tri, **_: F.scaled_dot_product_attention(
        _heads(x), _heads(y), _heads(y), attn_mask=tri
    ),
    "attention of PyTorch's module": lambda x, w, **_: _attention_layer()(x, x, x, need_weights=False)[0] @ w,
    "attention with weights": lambda x, tri, **_: list(
        _attention_layer()(x, x, x, attn_mask=~tri, average_attn_weights=False)
    ),
    "encoder layer": lambda x, **_: _encoder_layer()(x),
    "number": lambda x, **_: x * float(x.abs().max()),
}

_SEQUENCES = ("x", "y", "n")


def _run(operation, given):
    trained = {name: value for name, value in given.items() if value.is_floating_point()}
    result = whole_of(operation(**given))
    parts = [part for part in (result if isinstance(result, list) else [result]) if part.is_floating_point()]
    if not any(part.requires_grad for part in parts):
        return result, {}
    weights = torch.Generator().manual_seed(9)
    loss = sum((part * torch.randn(part.shape, generator=weights, dtype=part.dtype)).sum() for part in parts)
    loss.backward()
    return result, {name: value.grad for name, value in trained.items()}


def _alone(operation):
    given = _given()
    return _run(operation, {name: v.requires_grad_() if v.is_floating_point() else v for name, v in given.items()})


def _shared(operation, size):
    """The results, gradients and gathered bytes of each rank."""

    def rank(group):
        leaves = {name: v.requires_grad_() if v.is_floating_point() else v for name, v in _given().items()}
        given = {name: cut(value, group) if name in _SEQUENCES else value for name, value in leaves.items()}
        result = whole_of(made := operation(**given))
        parts = [part for part in (result if isinstance(result, list) else [result]) if part.is_floating_point()]
        if any(part.requires_grad for part in parts):
            weights = torch.Generator().manual_seed(9)
            loss = sum((part * torch.randn(part.shape, generator=weights, dtype=part.dtype)).sum() for part in parts)
            loss.backward()
        gathered = {name for name in group.gathered if name != "test"}
        return result, {name: v.grad for name, v in leaves.items() if v.is_floating_point()}, gathered, made

    return run_context(size, rank)


def _compare(operation, size):
    result, gradients = _alone(operation)
    everyone = _shared(operation, size)
    for theirs, *_ in everyone:
        torch.testing.assert_close(theirs, result, atol=1e-10, rtol=1e-10)
    for name, gradient in gradients.items():
        mine = [grads[name] for _, grads, *_ in everyone]
        if gradient is None:
            assert all(one is None or not one.any() for one in mine)
            continue
        mean = torch.stack([torch.zeros_like(gradient) if one is None else one for one in mine]).mean(0)
        torch.testing.assert_close(mean, gradient, atol=1e-10, rtol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    return everyone


@pytest.mark.parametrize("name", LOCAL)
def test_operations_with_a_rule_gather_nothing(name):
    for *_, gathered, _ in _compare(LOCAL[name], 2):
        assert not gathered


@pytest.mark.parametrize("name", [name for name in LOCAL if name.startswith(("pad ", "two ", "loss of ", "near "))])
def test_positions_move_between_three_ranks(name):
    for *_, gathered, _ in _compare(LOCAL[name], 3):
        assert not gathered


def test_only_positions_of_others_move():
    def rank(group):
        numbers = cut(torch.arange(48).view(1, 48), group)
        shifted = F.pad(numbers, (0, 1))[:, 1:] - numbers
        return group.received, whole_of(shifted).tolist()

    for received, shifted in run_context(2, rank):
        # Of a rank's two chunks of 12 the last number comes from the other rank; the middle chunks follow each other.
        assert received in (8, 16)
        assert shifted == [[1] * 47 + [-47]]


@pytest.mark.parametrize("name", GATHERING)
def test_operations_over_positions_gather(name):
    _compare(GATHERING[name], 3)


def test_what_was_gathered_is_cut_again():
    for *_, made in _compare(lambda x, **_: torch.roll(x, 1, 1), 2):
        assert isinstance(made, ShardedSequence)


#: Dims of queries and keys before their rows, the mask's shape, and whether heads share keys.
SHAPES_OF_ATTENTION = [
    *(((2, 4), (2, 4), mask, False) for mask in ((), (1,), (T,), (T, T), (T, 1), (1, T), (4, T, T), (2, 1, 1, T))),
    *(((4,), (4,), mask, False) for mask in ((), (T,), (T, T), (4, T, T))),
    *(((2, 3, 4), (2, 3, 4), mask, False) for mask in ((T,), (T, T), (4, T, T), (1, 1, 4, T, T), (2, 3, 1, T, 1), (3, 4, T, T))),
    *((before, keys, (T, T), False) for before, keys in (((2, 4), (1, 4)), ((2, 4), (2, 1)), ((2, 4), (4,)), ((2, 1), (2, 4)))),
    *((before, keys, (T, T), True) for before, keys in (((2, 4), (2, 2)), ((4,), (2,)), ((3, 2, 4), (3, 2, 2)))),
]  # fmt: skip


@pytest.mark.parametrize(("before", "keys", "mask", "grouped"), SHAPES_OF_ATTENTION)
def test_attention_takes_the_shapes_that_pytorch_takes(before, keys, mask, grouped):
    random = torch.Generator().manual_seed(3)
    shapes = ((*before, T, 4), (*keys, T, 4), (*keys, T, 5), mask)
    given = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]

    def run(leaves, parts):
        out = F.scaled_dot_product_attention(*parts, leaves[3], enable_gqa=grouped)
        (out * out).sum().backward()
        return whole_of(out), [leaf.grad for leaf in leaves]

    def rank(group):
        leaves = [each.clone().requires_grad_() for each in given]
        found = run(leaves, [cut(leaf, group, leaf.dim() - 2) for leaf in leaves[:3]])
        assert group.gathered.keys() <= {"test"}
        return found

    with sdpa_kernel(SDPBackend.MATH):  # the other one for the CPU takes no masks of one dim
        leaves = [each.clone().requires_grad_() for each in given]
        wanted, gradients = run(leaves, leaves[:3])
    assert_equal_to_alone(run_context(2, rank), wanted, gradients)


def test_attention_refuses_masks_of_more_dims():
    def rank(group):
        x = cut(torch.zeros(1, 2, T, 4), group, 2)
        with pytest.raises(SMPUserError, match="5 dims"):
            F.scaled_dot_product_attention(x, x, x, torch.zeros(1, 1, 1, T, T))

    run_context(2, rank)


def test_attention_runs_in_the_type_of_autocast():
    """As rotary positions in float32 beside values in half precision need it."""

    def attend(group=None):
        x, y = (_given()[name].float() for name in "xy")
        query, key = (cut(each, group) if group else each for each in (x, y))
        with torch.autocast("cpu", torch.bfloat16):
            found = F.scaled_dot_product_attention(_heads(query), _heads(key), _heads(key).bfloat16(), is_causal=True)
        return whole_of(found) if group else found

    expected = attend()
    for found in run_context(2, attend):
        assert found.dtype is expected.dtype is torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_transformers_makes_masks_for_packed_samples_only(monkeypatch, solo):
    def find(position_ids):
        return (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)

    module = SimpleNamespace(find_packed_sequence_indices=find)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", module)
    for _ in range(2):
        SequenceInputs(solo({}).ranks)  # which every model under context parallelism has
    positions = torch.arange(6)[None]
    assert module.find_packed_sequence_indices(positions) is None
    assert module.find_packed_sequence_indices(positions % 4).tolist() == [[0, 0, 0, 0, 1, 1]]
    assert module.find_packed_sequence_indices.__wrapped__ is find


def test_an_operation_keeps_nothing_until_the_garbage_collector_runs():
    """Inner functions that call themselves would: they are reference cycles."""

    def rank(group):
        held = []
        for name, operation in LOCAL.items():
            leaves = {name: v.requires_grad_() if v.is_floating_point() else v for name, v in _given().items()}
            given = {name: cut(value, group) if name in _SEQUENCES else value for name, value in leaves.items()}
            locals_of = [weakref.ref(given[name].local) for name in _SEQUENCES]
            operation(**given)
            given.clear()
            held += [name for one in locals_of if one() is not None]
        return held

    gc.collect()
    gc.disable()
    try:
        assert run_context(2, rank) == [[], []]
    finally:
        gc.enable()
