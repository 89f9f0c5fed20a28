"""A small decoder that is trained with its numbers recorded, and faults that nothing else would tell of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from support.models import loss_of, part

VOCABULARY, HIDDEN, HEADS, LENGTH = 13, 16, 2, 6


class Attention(nn.Module):
    """Causal, with positions by a table of frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, seq, hidden]
        batch, seq, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, HEADS, hidden // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, hidden))


class Block(nn.Module):
    """Attention and feed forward net."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.norm_2 = nn.LayerNorm(HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.mlp(self.norm_2(x))


class Waves(nn.Module):
    """Adds a wave to each feature, of frequencies that are a buffer."""

    frequencies: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1.0 / 10.0 ** (torch.arange(HIDDEN) / HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        return x + torch.sin(place[:, None] * self.frequencies.float()).to(x.dtype)


class Decoder(nn.Module):
    """Its head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.waves = Waves()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.waves(self.tokens(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


#: By name: number of ranks, and parameters of the library.
DEGREES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "mb": (1, {"microbatches": 4}),
    "dp": (2, {"ddp": True}),
    "dp-mb": (2, {"ddp": True, "microbatches": 2}),
    "zero": (2, {"ddp": True, "shard_optimizer_state": True}),
    "sdp": (
        2,
        {
            "ddp": True,
            "sharded_data_parallel_degree": 2,
            "sdp_param_persistence_threshold": 0,
            "sdp_gradient_clipping": 1e9,
        },
    ),
    "pp": (2, {"pipeline_parallel_degree": 2, "microbatches": 4}),
    "pp-dp": (4, {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}),
    "tp": (2, {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True}),
    "tp-own": (2, {"tensor_parallel_degree": 2, "ddp": True}),
}


def batch_of(step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, each ``[size, LENGTH]``, the same on every rank."""
    generator = torch.Generator().manual_seed(7000 + step)
    ids = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


@dataclass
class Training:
    """What a fault may change; it gets called before the first step."""

    module: nn.Module  # the script's, already wrapped
    model: Any
    optimizer: Any
    rank: int

    def parameter(self, name: str) -> Any:
        """By its name, where this rank has it."""
        return next((p for found, p in self.model.local_named_parameters() if found == name), None)

    def here(self, path: str) -> nn.Module | None:
        """A module, where this rank has it."""
        return next((module for found, module in self.model.local_named_modules() if found == path), None)


@dataclass(frozen=True)
class Fault:
    """What is wrong with a training, and where that must be found.

    Attributes:
        phases: of which the first difference must be in one.
        module: how the name of the tensor begins that must be found; several are divided by ``|``.
        before: changes the script's module before it is wrapped.
        wrapped: changes the training before its first step.
        batch: what a rank reads instead of its part: ``batch(step, rank, readers)``.
        step: what runs before each update.
        loss: instead of the mean.
        options: of ``smp.DistributedModel``.
        degrees: by name in ``DEGREES``.
    """

    phases: tuple[str, ...]
    module: str = ""
    before: Callable[[nn.Module, int], None] | None = None
    wrapped: Callable[[Training], None] | None = None
    batch: Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor]] | None = None
    step: Callable[[Training, int], Any] | None = None
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    options: tuple[tuple[str, Any], ...] = ()


def train(folder: str, fault: Fault | None = None, *, steps: int = 3, seed: int = 0, adam: bool = True) -> list[float]:
    """Train with numbers recorded into a folder; runs on every rank after ``smp.init``. Gives this rank's losses."""
    import smdistributed.modelparallel.torch as smp

    fault = fault or Fault(())
    smp.record_numerics(folder, every=1)
    torch.manual_seed(seed)
    module = Decoder()
    if fault.before is not None:
        fault.before(module, smp.rank())
    smp.set_tensor_parallelism(module.blocks, smp.tp_size() > 1)
    model = smp.DistributedModel(module, **dict(fault.options))
    make = torch.optim.AdamW if adam else torch.optim.SGD
    optimizer = smp.DistributedOptimizer(make(model.parameters(), lr=1e-2 if adam else 0.1), static_loss_scale=128.0)
    training = Training(model.module, model, optimizer, smp.rank())

    @smp.step
    def step_function(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model(ids).float()
        loss = (fault.loss or loss_of)(logits, targets)
        model.backward(loss)
        return loss

    def prepare(*_: Any) -> None:
        if fault.wrapped is not None:
            fault.wrapped(training)

    model.register_post_partition_hook(prepare)
    common = smp.state.cfg.prescaled_batch
    reader, readers = (smp.rdp_rank(), smp.rdp_size()) if common else (smp.dp_rank(), smp.dp_size())
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        mine = fault.batch(step, reader, readers) if fault.batch else part(batch_of(step), reader, readers)
        losses.append(float(step_function(*mine).reduce_mean()))
        if fault.step is None or fault.step(training, step) is not False:
            optimizer.step()
    return losses


# -- faults ----------------------------------------------------------------------------------------------------------


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
