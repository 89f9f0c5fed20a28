"""More silent faults: what is loaded, wired, clipped, updated or left out wrongly, on all ranks or on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from support.models.models import loss_of, part
from support.training.numerics_training import HEADS, Fault, Training, batch_of

Before = Callable[[nn.Module, int], None]
Batch = tuple[torch.Tensor, torch.Tensor]


# -- results and weights of the script's model -----------------------------------------------------------------------


def _forward(path: str, make: Callable[[Any], Callable[..., torch.Tensor]]) -> Before:
    """Another forward of a module; ``make`` gets the module with its usual forward."""

    def before(module: nn.Module, rank: int) -> None:
        found = module.get_submodule(path)
        found.forward = make(found)  # type: ignore[method-assign]

    return before


def _attention(*, causal: bool = True, scale: float | None = None, order: tuple[int, ...] = (0, 1, 2)) -> Any:
    def make(module: Any) -> Callable[..., torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            batch, seq, hidden = x.shape
            parts = module.qkv(x).view(batch, seq, 3, HEADS, hidden // HEADS).permute(2, 0, 3, 1, 4)
            q, k, v = (parts[place] for place in order)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
            return module.out(y.transpose(1, 2).reshape(batch, seq, hidden))

        return forward

    return make


def _heads_reversed(module: Any) -> Callable[..., torch.Tensor]:
    usual = module.forward
    return lambda y: usual(y.unflatten(-1, (HEADS, -1)).flip(-2).flatten(-2))


def _without_residual(module: Any) -> Callable[..., torch.Tensor]:
    return lambda x: x + module.mlp(module.norm_2(module.dropout(module.attention(module.norm_1(x)))))


def _of_result(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def make(module: Any) -> Callable[..., torch.Tensor]:
        usual = module.forward
        return lambda *args: change(usual(*args))

    return make


def _later_positions(module: Any) -> Callable[..., torch.Tensor]:
    usual = module.forward
    return lambda x: usual(F.pad(x, (0, 0, 1, 0)))[:, 1:]


def _untrained_head(module: nn.Module, rank: int) -> None:
    """The head does not give its part of the gradient to the weight that it shares."""
    head: Any = module.head
    head.forward = lambda x: F.linear(x, head.weight.detach())


def _loaded(name: str, change: Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]) -> Before:
    """A weight as a checkpoint that was read wrongly would have it."""

    def before(module: nn.Module, rank: int) -> None:
        weights = {found: weight.detach().clone() for found, weight in module.named_parameters()}
        with torch.no_grad():
            dict(module.named_parameters())[name].copy_(change(weights[name], weights))

    return before


def _layers_swapped(module: nn.Module, rank: int) -> None:
    weights = dict(module.named_parameters())
    one, other = weights["blocks.0.mlp.0.weight"], weights["blocks.1.mlp.0.weight"]
    with torch.no_grad():
        kept = one.detach().clone()
        one.copy_(other)
        other.copy_(kept)


# -- gradients -------------------------------------------------------------------------------------------------------


def _each_pass(name: str, change: Callable[[torch.Tensor, int], torch.Tensor], only: int | None = None) -> Any:
    """Another gradient in each backward pass; ``change`` gets the number of the pass."""

    def wrapped(training: Training) -> None:
        parameter, passes = training.parameter(name), [0]
        if parameter is None or only not in (None, training.rank):
            return

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            passes[0] += 1
            return change(gradient, passes[0] - 1)

        parameter.register_hook(hook)

    return wrapped


def _before_update(
    change: Callable[[Training, int, dict[str, torch.Tensor]], None], only: int | None = None
) -> Callable[[Training, int], None]:
    """Other gradients when they are reduced; ``change`` gets those of this rank, by name."""

    def step(training: Training, number: int) -> None:
        if only in (None, training.rank):
            named = training.model.local_named_parameters()
            change(training, number, {name: p.grad for name, p in named if p.grad is not None})

    return step


def _swap(_: Training, __: int, gradients: dict[str, torch.Tensor]) -> None:
    if "norm.weight" in gradients:
        one, other = gradients["norm.weight"], gradients["norm.bias"]
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def _roll(_: Training, __: int, gradients: dict[str, torch.Tensor]) -> None:
    if (found := gradients.get("blocks.1.norm_2.weight")) is not None:
        found.copy_(found.roll(1))


def _clip_stage(_: Training, __: int, gradients: dict[str, torch.Tensor]) -> None:
    """To a norm that leaves out the other stages."""
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for gradient in gradients.values():
        gradient.mul_(0.5 / norm)


def _clip_each(_: Training, __: int, gradients: dict[str, torch.Tensor]) -> None:
    """By the norm of each tensor instead of that of all."""
    for gradient in gradients.values():
        gradient.mul_((0.01 / gradient.norm()).clamp_max(1.0))


def _scale_on_a_rank(_: Training, __: int, gradients: dict[str, torch.Tensor]) -> None:
    gradients["blocks.0.norm_2.weight"].mul_(0.9)


class _Stale:
    """The gradient of the update before."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def __call__(self, training: Training, number: int, gradients: dict[str, torch.Tensor]) -> None:
        now = gradients["blocks.0.mlp.2.weight"]
        kept = self._kept.get(number - 1)
        self._kept = {number: now.clone()}
        if kept is not None:
            now.copy_(kept)


# -- updates ---------------------------------------------------------------------------------------------------------


def _update(
    name: str, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], only: int | None = None
) -> Callable[[Training, int], None]:
    """Another update of a parameter, from its value before and after the right one; nobody has looked at it yet."""

    def step(training: Training, number: int) -> None:
        parameter = training.parameter(name)
        if parameter is None or only not in (None, training.rank):
            return
        before, is_over = parameter.detach().clone(), [False]

        def updated(_: Any) -> None:
            if not is_over[0]:
                is_over[0] = True
                with torch.no_grad():
                    parameter.copy_(change(before, parameter.detach()))

        training.optimizer._session.after_update.insert(0, updated)

    return step


def _state(change: Callable[[dict[str, Any]], None], name: str | None = None) -> Callable[[Training, int], None]:
    """Another state of the optimizer before the third update."""

    def step(training: Training, number: int) -> None:
        if number == 2:
            chosen = training.parameter(name) if name else None
            for parameter, state in training.optimizer.state.items():
                if name is None or parameter is chosen:
                    change(state)

    return step


def _scale_of(name: str, factor: float) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        state[name].mul_(factor)

    return change


def _first_step_again(state: dict[str, Any]) -> None:
    state["step"].zero_()


def _betas(training: Training, number: int) -> None:
    for group in training.optimizer.param_groups:
        group["betas"] = (0.5, 0.999)


def _large_epsilon(training: Training, number: int) -> None:
    for group in training.optimizer.param_groups:
        group["eps"] = 1e-2


# -- copies on one rank ----------------------------------------------------------------------------------------------


def _buffer_later(training: Training, number: int) -> None:
    waves = training.here("waves")
    if waves is not None and number == 1:
        waves.frequencies.mul_(1.05)  # type: ignore[operator, union-attr]


def _result_on_a_rank(training: Training) -> None:
    block = training.here("blocks.1")
    if block is not None and training.rank == 1:
        block.register_forward_hook(lambda module, args, result: result * 1.05, prepend=True)


class _OldWeights:
    """On a rank, weights of the first update come back after the second, as after an all-gather that was too early."""

    def __init__(self) -> None:
        self._kept: torch.Tensor | None = None

    def __call__(self, training: Training, number: int) -> None:
        weight = training.parameter("blocks.1.norm_1.weight")
        if training.rank != 1 or weight is None:
            return
        if number == 0:
            self._kept = weight.detach().clone()
        elif number == 1 and self._kept is not None:
            kept, heard = self._kept, training.optimizer._session.after_update

            def updated(_: Any) -> None:
                heard.remove(updated)
                with torch.no_grad():
                    weight.copy_(kept)

            heard.append(updated)


# -- batches and losses ----------------------------------------------------------------------------------------------


def _next_batch(step: int, reader: int, readers: int) -> Batch:
    return part(batch_of(step + (step >= 1)), reader, readers)


def _fewer_samples(step: int, reader: int, readers: int) -> Batch:
    ids, targets = part(batch_of(step), reader, readers)
    return ids[:-1], targets[:-1]


def _ids_of_another_sample(step: int, reader: int, readers: int) -> Batch:
    ids, targets = part(batch_of(step), reader, readers)
    return ids.roll(1, 0), targets


def _shorter(step: int, reader: int, readers: int) -> Batch:
    ids, targets = part(batch_of(step), reader, readers)
    return ids[:, :-1], targets[:, :-1]


def _cross_entropy(**options: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)


FAULTS: dict[str, Fault] = {
    "queries and keys swapped": Fault(
        ("output",), "blocks.0", before=_forward("blocks.0.attention", _attention(order=(1, 0, 2)))
    ),
    "attention sees the future": Fault(
        ("output",), "blocks.1", before=_forward("blocks.1.attention", _attention(causal=False))
    ),
    "attention scaled otherwise": Fault(
        ("output",), "blocks.0", before=_forward("blocks.0.attention", _attention(scale=0.9))
    ),
    "heads in another order": Fault(
        ("output",), "blocks.1", before=_forward("blocks.1.attention.out", _heads_reversed)
    ),
    "a residual connection lost": Fault(("output",), "blocks.0", before=_forward("blocks.0", _without_residual)),
    # What it gives is its argument, which on another stage has no result of its own.
    "a layer skipped": Fault(("output",), "blocks.1|norm", before=_forward("blocks.1", lambda module: lambda x: x)),
    "positions shifted by one": Fault(("output",), "waves", before=_forward("waves", _later_positions)),
    "logits of another temperature": Fault(("output",), "head", before=_forward("head", _of_result(lambda y: y * 1.1))),
    "a norm without its bias": Fault(
        ("output",),
        "norm",
        before=_forward("norm", lambda m: lambda x: F.layer_norm(x, m.normalized_shape) * m.weight + 0.05),
    ),
    "no gradient through the feed forward net": Fault(
        ("output gradient",),
        "blocks.0|waves|tokens",
        before=_forward("blocks.0.mlp.2", _of_result(lambda y: y.detach() + 0.0 * y)),
    ),
    "a shared weight's second gradient missed": Fault(("gradient",), "tokens", before=_untrained_head),
    "rows of the embedding swapped": Fault(
        ("weight",), "tokens", before=_loaded("tokens.weight", lambda w, _: w[[1, 0, *range(2, len(w))]])
    ),
    "a weight transposed": Fault(
        ("weight",), "blocks.1.attention.out", before=_loaded("blocks.1.attention.out.weight", lambda w, _: w.t())
    ),
    "weights of two layers swapped": Fault(("weight",), "blocks.0.mlp.0|blocks.1.mlp.0", before=_layers_swapped),
    "a bias not loaded": Fault(
        ("weight",), "blocks.1.attention.qkv.bias", before=_loaded("blocks.1.attention.qkv.bias", lambda w, _: 0.0 * w)
    ),
    "queries, keys and values in another order": Fault(
        ("weight",),
        "blocks.0.attention.qkv",
        before=_loaded("blocks.0.attention.qkv.weight", lambda w, _: w.roll(16, 0)),
    ),
    "the last microbatch's gradient lost": Fault(
        ("gradient",), "blocks.1.norm_1", wrapped=_each_pass("blocks.1.norm_1.weight", lambda g, n: g * (n % 4 != 3))
    ),
    "the first microbatch counted twice": Fault(
        ("gradient",),
        "blocks.1.norm_1",
        wrapped=_each_pass("blocks.1.norm_1.weight", lambda g, n: g * (1 + (n % 4 == 0))),
    ),
    "a gradient's sign": Fault(("gradient",), "norm.bias", wrapped=_each_pass("norm.bias", lambda g, _: -g)),
    "a gradient clipped element by element": Fault(
        ("gradient",), "blocks.1.mlp.0", wrapped=_each_pass("blocks.1.mlp.0.weight", lambda g, _: g.clamp(-1e-4, 1e-4))
    ),
    "a gradient rounded on its way": Fault(
        ("gradient",),
        "blocks.0.mlp.0",
        wrapped=_each_pass("blocks.0.mlp.0.weight", lambda g, _: g.bfloat16().to(g.dtype)),
    ),
    "a rank's gradient of another microbatch": Fault(
        ("gradient",),
        "blocks.0.norm_1",
        wrapped=_each_pass("blocks.0.norm_1.weight", lambda g, _: g.roll(1), only=1),
    ),
    "gradients of two parameters swapped": Fault(("gradient",), "norm", step=_before_update(_swap)),
    "a gradient one element off in its bucket": Fault(("gradient",), "blocks.1.norm_2", step=_before_update(_roll)),
    "clipped by the norm of one stage": Fault(("gradient",), "", step=_before_update(_clip_stage)),
    "clipped by the norm of each tensor": Fault(("gradient",), "", step=_before_update(_clip_each)),
    "a gradient not reduced on a rank": Fault(
        ("gradient",), "blocks.0.norm_2", step=_before_update(_scale_on_a_rank, only=1)
    ),
    "the gradient of the update before": Fault(("gradient",), "blocks.0.mlp.2", step=_before_update(_Stale())),
    "a parameter left out of the optimizer": Fault(
        ("update",), "blocks.0.mlp.2.bias", step=_update("blocks.0.mlp.2.bias", lambda old, new: old)
    ),
    "a group with another learning rate": Fault(
        ("update",), "norm.weight", step=_update("norm.weight", lambda old, new: old + 1.5 * (new - old))
    ),
    "weight decay on a norm": Fault(
        ("update",), "norm.weight", step=_update("norm.weight", lambda old, new: new - 0.02 * old)
    ),
    "an update lost on a rank": Fault(
        ("update", "weight"), "norm.bias", step=_update("norm.bias", lambda old, new: old, only=1)
    ),
    "momentum of a parameter lost": Fault(
        ("update",), "blocks.1.mlp.0.weight", step=_state(_scale_of("exp_avg", 0.0), "blocks.1.mlp.0.weight")
    ),
    "second moments read wrongly": Fault(("update",), "", step=_state(_scale_of("exp_avg_sq", 4.0))),
    "the optimizer's count of steps lost": Fault(("update",), "", step=_state(_first_step_again)),
    "another momentum": Fault(("update",), "", step=_betas),
    "another epsilon of the optimizer": Fault(("update",), "", step=_large_epsilon),
    "a buffer that changes": Fault(("buffer", "output"), "waves", step=_buffer_later),
    "a tensor parallel rank's result differs": Fault(("output",), "blocks.1", wrapped=_result_on_a_rank),
    "a rank gathers old weights": Fault(("weight",), "blocks.1.norm_1", step=_OldWeights()),
    "a resumed run is a batch further": Fault(("input",), batch=_next_batch),
    "the last sample dropped": Fault(("input",), batch=_fewer_samples),
    "inputs of another sample": Fault(("loss",), batch=_ids_of_another_sample),
    "a shorter sequence": Fault(("input",), batch=_shorter),
    "a token ignored by the loss": Fault(("loss", "output gradient"), loss=_cross_entropy(ignore_index=0)),
    "smoothed labels": Fault(("loss",), loss=_cross_entropy(label_smoothing=0.1)),
    "a mean over one microbatch too few": Fault(("loss",), loss=lambda logits, t: loss_of(logits, t) * (4 / 3)),
}

#: At which degrees they mean something; the others are tried in turn.
AT: dict[str, tuple[str, ...]] = {
    "no gradient through the feed forward net": ("dp", "pp"),
    "a shared weight's second gradient missed": ("one", "dp"),
    "the last microbatch's gradient lost": ("mb", "pp"),
    "the first microbatch counted twice": ("mb", "pp"),
    "a gradient's sign": ("dp", "pp"),
    "a gradient clipped element by element": ("dp", "pp"),
    "a gradient rounded on its way": ("dp", "zero"),
    "a rank's gradient of another microbatch": ("dp", "zero"),
    "gradients of two parameters swapped": ("one", "dp", "pp"),
    "a gradient one element off in its bucket": ("dp", "pp"),
    "clipped by the norm of one stage": ("pp", "pp-dp"),
    "clipped by the norm of each tensor": ("dp", "pp"),
    "a gradient not reduced on a rank": ("dp",),
    "the gradient of the update before": ("one", "dp"),
    "a parameter left out of the optimizer": ("one", "pp"),
    "a group with another learning rate": ("one", "dp", "pp"),
    "weight decay on a norm": ("one", "dp", "pp"),
    "an update lost on a rank": ("dp",),
    "momentum of a parameter lost": ("one", "dp", "pp"),
    "second moments read wrongly": ("dp", "zero", "sdp", "pp"),
    "the optimizer's count of steps lost": ("dp", "zero", "sdp", "pp"),
    "a buffer that changes": ("one", "dp", "pp"),
    "a tensor parallel rank's result differs": ("tp",),
    "a rank gathers old weights": ("dp",),
    "the last sample dropped": ("dp", "zero"),
    "heads in another order": ("dp", "pp"),
    "queries, keys and values in another order": ("dp", "sdp", "pp"),
}

#: Of these, what half precision's rounding hides, or what changes only the weights that the model computes with, and not those in
#: float32 that are updated.
BELOW_ROUNDING = (
    *("a gradient rounded on its way", "attention scaled otherwise", "a norm without its bias"),
    *("a parameter left out of the optimizer", "a group with another learning rate", "weight decay on a norm"),
    *("an update lost on a rank", "a rank gathers old weights", "smoothed labels"),
)
#: And one that is not found there: an adaptive optimizer may make as much of what is only rounding.
MISSED_IN_HALF = ("momentum of a parameter lost",)
