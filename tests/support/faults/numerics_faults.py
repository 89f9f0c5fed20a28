"""Silent faults of a training: what is wrong, and where it must be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from support.faults import numerics_more_faults as more
from support.models.models import loss_of, part
from support.training.numerics_training import VOCABULARY, Fault, Training, batch_of


def on_result(path: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module, int], None]:
    """Another result of a module."""

    def before(module: nn.Module, rank: int) -> None:
        found = module.get_submodule(path)
        forward = found.forward
        found.forward = lambda *args: change(forward(*args))  # type: ignore[method-assign]

    return before


def on_gradient(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], only: int | None = None
) -> Callable[[Training], None]:
    """Another gradient of a parameter in each backward pass, on one rank or all."""

    def wrapped(training: Training) -> None:
        parameter = training.parameter(name)
        if parameter is not None and only in (None, training.rank):
            parameter.register_hook(change)

    return wrapped


def on_weights(change: Callable[[nn.Module, int], None]) -> Callable[[nn.Module, int], None]:
    """Other weights before wrapping."""

    def before(module: nn.Module, rank: int) -> None:
        with torch.no_grad():
            change(module, rank)

    return before


def _backward_scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """The same tensor, whose gradient is multiplied."""
    return x * factor + (x * (1 - factor)).detach()


def _untie(module: nn.Module, rank: int) -> None:
    module.head.weight = nn.Parameter(module.tokens.weight.detach().clone())  # type: ignore[union-attr]


def _round_frequencies(module: nn.Module, rank: int) -> None:
    module.waves.frequencies.copy_(module.waves.frequencies.bfloat16().float())  # type: ignore[union-attr, operator]


def _every_second_pass(training: Training) -> None:
    seen: list[int] = []

    def change(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return gradient * (len(seen) % 2)

    on_gradient("norm.weight", change)(training)


def _same_batch(step: int, reader: int, readers: int) -> tuple[torch.Tensor, torch.Tensor]:
    return part(batch_of(step), 0, readers)


def _swapped_targets(step: int, reader: int, readers: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, targets = part(batch_of(step), reader, readers)
    return ids, targets.roll(targets.shape[0] // 2, 0)


def _shifted_targets(step: int, reader: int, readers: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, targets = part(batch_of(step), reader, readers)
    return ids, targets.roll(1, 1)


def _repeated_sample(step: int, reader: int, readers: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, targets = part(batch_of(step), reader, readers)
    return torch.cat([ids[:-1], ids[:1]]), torch.cat([targets[:-1], targets[:1]])


def _stale_batch(step: int, reader: int, readers: int) -> tuple[torch.Tensor, torch.Tensor]:
    return part(batch_of(max(step - 1, 0)), reader, readers)


def _tokens_off_by_one(step: int, reader: int, readers: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, targets = part(batch_of(step), reader, readers)
    return (ids + 1) % VOCABULARY, targets


def _skip_second_update(training: Training, step: int) -> bool | None:
    if step == 1:
        for group in training.optimizer.param_groups:
            group["lr"], group["was"] = 0.0, group["lr"]
    elif step == 2:
        for group in training.optimizer.param_groups:
            group["lr"] = group["was"]
    return None


def _rate(factor: float) -> Callable[[Training, int], None]:
    def step(training: Training, step: int) -> None:
        if step == 0:
            for group in training.optimizer.param_groups:
                group["lr"] *= factor

    return step


def _forget_state(training: Training, step: int) -> None:
    if step == 2:
        training.optimizer.state.clear()


def _no_decay(training: Training, step: int) -> None:
    if step == 0:
        for group in training.optimizer.param_groups:
            group["weight_decay"] = 3.0


def _changed_between_steps(only: int | None) -> Callable[[Training, int], None]:
    def step(training: Training, step: int) -> None:
        weight = training.parameter("norm.weight")
        if step == 1 and weight is not None and only in (None, training.rank):
            hook: list[Any] = []

            def change(optimizer: Any) -> None:
                with torch.no_grad():
                    weight.mul_(1.1)
                training.optimizer._session.after_update.remove(hook[0])

            hook.append(change)
            training.optimizer._session.after_update.append(change)

    return step


def _grads_scaled(factor: float) -> Callable[[Training, int], None]:
    def step(training: Training, step: int) -> None:
        for _, parameter in training.model.local_named_parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    return step


def _one_grad_scaled(name: str, factor: float) -> Callable[[Training, int], None]:
    def step(training: Training, step: int) -> None:
        parameter = training.parameter(name)
        if parameter is not None and parameter.grad is not None:
            parameter.grad.mul_(factor)

    return step


def _dropout_on(module: nn.Module, rank: int) -> None:
    module.blocks[1].dropout.p = 0.1  # type: ignore[index, union-attr]


def _eps(module: nn.Module, rank: int) -> None:
    module.norm.eps = 1e-3  # type: ignore[union-attr]


def _other_gelu(module: nn.Module, rank: int) -> None:
    module.blocks[0].mlp[1].approximate = "tanh"  # type: ignore[index, union-attr]


FAULTS: dict[str, Fault] = {
    "result scaled": Fault(("output",), "blocks.0", before=on_result("blocks.0", lambda y: y * 1.001)),
    "result of the last block scaled": Fault(("output",), "blocks.1", before=on_result("blocks.1", lambda y: y * 0.99)),
    "head's result in half precision": Fault(
        ("output",), "head|", before=on_result("head", lambda y: y.bfloat16().float())
    ),
    "norm's result rounded": Fault(("output",), "norm", before=on_result("norm", lambda y: y.half().float())),
    "another epsilon": Fault(("output",), "norm", before=_eps),
    "another activation": Fault(("output",), "blocks.0", before=_other_gelu),
    "rounded frequencies": Fault(("buffer", "output"), "waves", before=on_weights(_round_frequencies)),
    "gradient of a result scaled": Fault(
        ("output gradient",), "norm|blocks.1", before=on_result("norm", lambda y: _backward_scaled(y, 2.0))
    ),
    "gradient of the first block's result scaled": Fault(
        ("output gradient",), "blocks.0|waves", before=on_result("blocks.0", lambda y: _backward_scaled(y, 0.5))
    ),
    "gradient of a weight scaled": Fault(
        ("gradient",), "norm.weight", wrapped=on_gradient("norm.weight", lambda g: g * 2.0)
    ),
    "gradient of the embedding scaled": Fault(
        ("gradient",), "tokens.weight", wrapped=on_gradient("tokens.weight", lambda g: g * 1.01)
    ),
    "a rank's gradient lost": Fault(
        ("gradient",), "norm.bias", wrapped=on_gradient("norm.bias", lambda g: g * 0.0, only=1)
    ),
    "gradients accumulated every second time": Fault(("gradient",), "norm.weight", wrapped=_every_second_pass),
    "weights not tied": Fault(("gradient", "weight"), "tokens|head", before=_untie),
    "microbatches summed": Fault(("output gradient",), options=(("average_grads_across_microbatches", False),)),
    "loss summed": Fault(("loss",), loss=lambda logits, t: loss_of(logits, t) * 2.0),
    "loss of the last tokens only": Fault(("loss",), loss=lambda logits, t: loss_of(logits[:, 1:], t[:, 1:])),
    "the same batch on all replicas": Fault(("input",), batch=_same_batch),
    "targets of another microbatch": Fault(("loss",), batch=_swapped_targets),
    "targets shifted": Fault(("loss",), batch=_shifted_targets),
    "a sample repeated": Fault(("input",), batch=_repeated_sample),
    "the last step's batch again": Fault(("input",), batch=_stale_batch),
    "tokens off by one": Fault(("input",), batch=_tokens_off_by_one),
    "an update lost": Fault(("update",), step=_skip_second_update),
    "twice the learning rate": Fault(("update",), step=_rate(2.0)),
    "a tenth more learning rate": Fault(("update",), step=_rate(1.1)),
    "optimizer state lost": Fault(("update",), step=_forget_state),
    "more weight decay": Fault(("update",), step=_no_decay),
    "weights changed between steps": Fault(("weight",), "norm.weight", step=_changed_between_steps(None)),
    "weights changed on one rank": Fault(("weight",), "norm.weight", step=_changed_between_steps(1)),
    "gradients scaled before the update": Fault(("gradient",), step=_grads_scaled(0.5)),
    "a gradient scaled before the update": Fault(("gradient",), "norm.bias", step=_one_grad_scaled("norm.bias", 3.0)),
    "dropout left on": Fault(("output",), "blocks.1", before=_dropout_on),
    "other first weights": Fault(
        ("weight",),
        "blocks.1.mlp.0.weight",
        before=on_weights(lambda m, _: m.blocks[1].mlp[0].weight.mul_(1.001)),  # type: ignore[index, union-attr, operator]
    ),
    "a row of the embedding zero": Fault(
        ("weight",),
        "tokens.weight",
        before=on_weights(lambda m, _: m.tokens.weight[3].zero_()),  # type: ignore[union-attr, index, operator]
    ),
    "weights rounded": Fault(
        ("weight",),
        "blocks.0.attention.out.weight",
        before=on_weights(
            lambda m, _: m.blocks[0].attention.out.weight.copy_(m.blocks[0].attention.out.weight.bfloat16())
        ),  # type: ignore[index, union-attr, operator]
    ),
}

FAULTS |= more.FAULTS

#: By fault, the degrees at which it means something and is tried; those of a single kind of rank where it is silent otherwise.
AT: dict[str, tuple[str, ...]] = {
    "a rank's gradient lost": ("dp", "dp-mb", "zero"),
    "gradients accumulated every second time": ("mb", "pp"),
    "microbatches summed": ("mb", "pp", "dp-mb"),
    "the same batch on all replicas": ("dp", "sdp", "tp-own"),
    "targets of another microbatch": ("mb", "pp"),
    "weights changed on one rank": ("dp", "pp-dp"),
    "weights changed between steps": ("one", "dp", "pp"),
    "gradients scaled before the update": ("one", "dp", "mb"),
    "a gradient scaled before the update": ("one", "dp", "mb"),
    "weights not tied": ("one", "dp", "zero"),
    "gradient of a weight scaled": ("dp", "pp", "zero"),
    "gradient of the embedding scaled": ("dp", "zero"),
    **more.AT,
}
#: Of the others, in turn.
_OTHERS = (("dp", "pp"), ("sdp", "tp"), ("zero", "pp-dp"), ("tp-own", "mb"))


def cases() -> Iterator[tuple[str, str]]:
    """Faults with the degrees at which they are tried."""
    turn = 0
    for name in FAULTS:
        if name in AT:
            degrees = AT[name]
        else:
            degrees, turn = _OTHERS[turn % len(_OTHERS)], turn + 1
        yield from ((name, each) for each in degrees)
