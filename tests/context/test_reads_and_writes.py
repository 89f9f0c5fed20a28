"""What a script reads of sequences that ranks share out, and writes to them, is as in one process, or an error that says so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.ranks.context_threads import cut, run_context, see_sequences, whole_of

from smp_runtime.context.rules import losses
from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.torch_private import TorchDispatchMode

B, T, D = 2, 12, 6


@pytest.fixture(autouse=True)
def functions_see_sequences(monkeypatch):
    see_sequences(monkeypatch)


def _given(dtype=torch.float64):
    random = torch.Generator().manual_seed(3)
    return torch.randn(B, T, D, generator=random, dtype=dtype), torch.randn(D, D, generator=random, dtype=dtype)


def _write_to_a_view_of_a_slice(x):
    x[:, 1:].transpose(1, 2).mul_(2)


def _write_by_activation(x):
    F.relu(x[:, 1:], True)


def _write_to_rows(x):
    x.view(-1, D)[3:5].zero_()


def _write_to_a_slice_of_a_slice(x):
    x[:, 1:][:, :, 0] = 3.0


WRITES = {
    "one position": lambda x: x[:, 0].zero_(),
    "selected": lambda x: x.select(1, 3).mul_(2),
    "view of a slice": _write_to_a_view_of_a_slice,
    "slice of a slice": _write_to_a_slice_of_a_slice,
    "activation": _write_by_activation,
    "rows of all samples": _write_to_rows,
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_to_copies_of_positions_are_errors(name):
    def rank(group):
        x = cut(_given()[0], group) * 1
        WRITES[name](x)
        assert x.shape == (B, T, D)  # facts are no elements
        with pytest.raises(SMPUserError, match="some of its positions were changed in place"):
            x + 1

    run_context(2, rank)


def test_a_slice_of_what_was_changed_since_is_an_error():
    def rank(group):
        x = cut(_given()[0], group) * 1
        before, later = x[:, 1:], x[:, 1:]
        x.mul_(2)
        with pytest.raises(SMPUserError, match="that these positions are of was changed"):
            before.sum()
        del later

    run_context(2, rank)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[:, T],
        lambda x: x[:, -T - 1],
        lambda x: x[..., [0, D]],
        lambda x: x[:, :, torch.tensor([-D - 1])],
        lambda x: x.select(1, T),
        lambda x: x.narrow(1, T - 2, 5),
    ],
)
def test_positions_that_are_not_there_are_errors(read):
    def rank(group):
        with pytest.raises((IndexError, RuntimeError), match="out of|exceeds"):
            read(cut(_given()[0], group))

    run_context(2, rank)


def _kept(h, w):
    h.retain_grad()
    (h @ w).pow(3).sum().backward(retain_graph=True)
    return h.grad * 1


def _seen_by_a_hook(h, w):
    seen = []
    h.register_hook(seen.append)
    (h @ w).pow(3).sum().backward(retain_graph=True)
    return seen[0] * 1


def _changed_by_a_hook(h, w):
    h.register_hook(lambda gradient: gradient.clamp(-1, 1) / gradient.norm() + 0.1)
    return (h @ w).pow(3).sum()


class _Product(torch.nn.Module):
    """A product of a sequence and a whole matrix, at each position or as the mean of all."""

    def __init__(self, is_pooled=False):
        super().__init__()
        self.is_pooled = is_pooled

    def forward(self, h, w):
        product = (h @ w).pow(3)
        return product.mean(1) if self.is_pooled else product


def _seen_by_hooks_of_a_module(h, w):
    module, seen = _Product(), []
    module.register_full_backward_pre_hook(lambda _, outputs: seen.extend(outputs))
    module.register_full_backward_hook(lambda _, inputs, outputs: seen.extend([*inputs, *outputs]))
    module(h, w).pow(2).sum().backward(retain_graph=True)
    assert len(seen) == 4
    return seen[0] + seen[1] + seen[2].sum() + seen[3].norm()


def _changed_by_hooks_of_a_module(h, w, is_pooled=False):
    module = _Product(is_pooled)
    module.register_full_backward_pre_hook(lambda _, outputs: (outputs[0].clamp(-1, 1) / outputs[0].norm(),))
    module.register_full_backward_hook(
        lambda _, inputs, outputs: (inputs[0] + outputs[0].sum(), inputs[1] * inputs[1].norm())
    )
    module.register_full_backward_hook(lambda _, inputs, outputs: (inputs[0] / inputs[0].norm(), inputs[1]))
    return module(h, w).pow(2).sum()


READS = {
    "seen by hooks of a module": _seen_by_hooks_of_a_module,
    "changed by hooks of a module": _changed_by_hooks_of_a_module,
    "changed by hooks of a module with a whole result": lambda h, w: _changed_by_hooks_of_a_module(h, w, True),
    "kept": _kept,
    "seen by a hook": _seen_by_a_hook,
    "changed by a hook": _changed_by_a_hook,
    "of a sequence": lambda h, w: torch.autograd.grad((h @ w).pow(3).sum(), h, create_graph=True)[0].pow(2).sum(),
    "of a parameter": lambda h, w: torch.autograd.grad((h @ w).pow(3).sum(), [w], create_graph=True)[0].norm(),
    "of what a generator yields": lambda h, w: torch.autograd.grad(
        (h @ w).sum(), (each for each in [w]), create_graph=True
    )[0].sum(),
    "with gradients given": lambda h, w: torch.autograd.grad(h @ w, h, h.detach() * 2, create_graph=True)[0].pow(2),
    "of a loss of converted scores": lambda h, w: torch.autograd.grad(
        F.cross_entropy((h @ w).to(h.dtype, copy=True).view(-1, D), torch.arange(B * T) % D), w, create_graph=True
    )[0].norm(),
    "of what is gathered": lambda h, w: torch.autograd.grad(
        (torch.roll(h, 1, 1) @ w).pow(3).sum(), h, create_graph=True
    )[0].pow(2),
    "without ranks": lambda h, w: torch.autograd.grad(w.square().sum(), w, create_graph=True)[0].sum() + h.sum(),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_that_scripts_read_are_those_of_one_process(name, size):
    def train(group=None):
        x, w = (each.requires_grad_() for each in _given())
        h = (cut(x, group) if group else x) * 2
        found = READS[name](h, w)
        if found.requires_grad:
            (found * found).sum().backward()
        return whole_of(found).detach(), x.grad, w.grad

    wanted, *gradients = train()
    everyone = run_context(size, train)
    for found, *_ in everyone:
        torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)
    for number, gradient in enumerate(gradients):
        mine = [gradients_of_rank[number] for _, *gradients_of_rank in everyone]
        if gradient is None:
            assert mine == [None] * size
        else:
            mean = sum(one if one is not None else 0 for one in mine) / size
            torch.testing.assert_close(mean, gradient, atol=1e-9, rtol=1e-9)


def test_older_backward_hooks_of_modules_are_refused():
    layer = torch.nn.Linear(D, D, dtype=torch.float64)
    layer.register_backward_hook(lambda *_: None)

    def rank(group):
        with pytest.raises(SMPUserError, match="Linear has a hook of register_backward_hook"):
            layer(cut(_given()[0].requires_grad_(), group))

    run_context(2, rank)


def test_numbers_of_half_precision_are_added_up_in_float32():
    many = torch.full((1, 40_000, 4), 3.0, dtype=torch.float16)
    words = torch.arange(40_000).view(1, -1) % 3

    def rank(group):
        scores = cut(many, group)
        loss = F.cross_entropy(scores.view(-1, 4), cut(words, group).view(-1), ignore_index=1)
        return scores.mean().item(), loss.item()

    wanted = many.mean().item(), F.cross_entropy(many.view(-1, 4), words.view(-1), ignore_index=1).item()
    for found in run_context(2, rank):
        assert found == pytest.approx(wanted, rel=1e-3)


class _Large(TorchDispatchMode):
    """Notes the operations that return something of a size."""

    def __init__(self, size):
        super().__init__()
        self.size, self.names = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        if isinstance(found, torch.Tensor) and found.untyped_storage().nbytes() == self.size:
            self.names.append(str(func))
        return found


def test_a_loss_of_converted_scores_has_one_gradient_of_their_size(monkeypatch):
    monkeypatch.setattr(losses, "_AT_A_TIME", 64)
    words = torch.arange(T).view(1, T) % D

    def rank(group):
        scores = cut(_given(torch.bfloat16)[0][:1].requires_grad_(), group).float().view(-1, D)
        loss = F.cross_entropy(scores, cut(words, group).view(-1))
        with _Large(T // 2 * D * 4) as large:
            loss.backward()
        return [name for name in large.names if not name.startswith(("aten.view", "aten.split", "aten.exp_"))]

    for names in run_context(2, rank):
        assert names.count("aten.empty_like.default") == 1
        assert not any("softmax" in name or "nll_loss" in name for name in names)
