"""Small models with what makes a pipeline hard, each with its batches and its loss."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from support.models.models import TiedNet, loss_of, token_batch

WIDTH = 6


# -- models ------------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Residuals around remote and local children; the child of a child may be at home again."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH) if depth == 0 else Residual(depth - 1)
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, width] -> [batch, width]
        inner = self.inside(x) + x
        return x + self.last(torch.tanh(self.mixed(inner) * inner))


class Branching(nn.Module):
    """Which child runs depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.left = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.right = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        for _ in range(2):
            y = y + (self.left(y) if float(y.detach().sum()) > 0 else self.right(y))
        return y


class Recurrent(nn.Module):
    """Layers that hold lists of their own weights, and return nested tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.forget = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.gated = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, (hidden, cell) = self.forget(x[:, None] * torch.arange(1.0, 4.0)[:, None])
        y, state = self.gated(y, (hidden * cell).sum(0, keepdim=True))
        return self.last(y[:, -1] + state[0])


class Twice(nn.Module):
    """One module used several times, on several shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.shared(self.shared(x))
        pooled = self.shared(self.other(y).mean(0, keepdim=True))
        return self.shared(y) + pooled


class Normed(nn.Module):
    """Running statistics that depend on the order of the microbatches; in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH, bias=False))
            for _ in range(3)
        )
        self.norm = nn.BatchNorm1d(WIDTH, momentum=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lift(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@dataclasses.dataclass
class Pair:
    """What a module may return."""

    value: torch.Tensor
    count: int
    nothing: None = None


class Splitter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("factor", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor, *, scale: float, extras: dict[str, Any]) -> dict[str, Any]:
        shifted = x + extras["shift"][0] * scale
        return {
            "parts": (self.a(shifted), [self.b(shifted) * self.factor, None]),
            "count": len(extras["names"]),
            "mask": shifted.detach() > 0,
            "name": extras["names"][0],
        }


class Joiner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, parts: Any, mask: torch.Tensor, absent: None = None) -> Pair:
        first, (second, nothing) = parts
        assert nothing is None
        assert absent is None
        assert mask.dtype is torch.bool
        return Pair(self.out(first.masked_fill(mask, 0.0) + second), int(mask.shape[0]))


class Containers(nn.Module):
    """Dictionaries, tuples, dataclasses, None and numbers between modules, by position and by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(WIDTH, WIDTH)
        self.split, self.join = Splitter(), Joiner()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Pair:
        x = self.lift(x)
        made = self.split(x, scale=0.5, extras={"shift": (torch.tanh(x),), "names": ["u", "v"]})
        assert made["count"] == 2
        assert made["name"] == "u"
        joined = self.join(made["parts"], made["mask"], absent=None)
        assert isinstance(joined, Pair)
        assert joined.count == x.shape[0]
        assert joined.nothing is None
        return Pair(self.frozen(joined.value) + x, joined.count)


class Notes:
    """An object that modules write to, as Transformers' caches are."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.seen = 0

    def add(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(x)
        self.seen += 1
        return sum(self.kept) / len(self.kept)


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, notes: Notes, trail: list[torch.Tensor]) -> torch.Tensor:
        y = torch.tanh(self.linear(notes.add(x)))
        trail.append(y)
        return y


class Mutating(nn.Module):
    """Modules that change the list and the object passed to them; gradients flow through what they left there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Writing() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        notes, trail = Notes(), [x]
        for layer in self.layers:
            x = layer(x, notes, trail)
        assert notes.seen == 3
        assert len(notes.kept) == 3
        assert len(trail) == 4
        return self.head(x + trail[1] * trail[2]) + notes.kept[-1]


class InPlaceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(F.relu_(x))


class InPlace(nn.Module):
    """In-place operations on what remote modules get and give."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), InPlaceFirst()
        self.third = nn.Linear(WIDTH, WIDTH)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x))
        y *= 0.5
        y.add_(x)
        y = self.third(y)
        y[:, 0] += 1.0
        return self.third(self.act(y))


class Passing(nn.Module):
    """Returns an input as it is, and more than anybody wants."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, self.linear(y), y, self.linear(x)


class Unused(nn.Module):
    """Inputs returned unchanged, outputs that nobody uses, parts without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Passing(), Passing()
        self.aside = nn.Linear(WIDTH, WIDTH)
        self.same = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, _ = self.first(x, torch.tanh(x))
        self.aside(b)
        with torch.no_grad():
            weight = self.aside(b).sigmoid()
        d, e, f, _ = self.second(self.same(b), c)
        return a + d * weight + e + self.same(f).detach() + self.aside(b.detach()).detach()


class Dropping(nn.Module):
    """Dropout in children and in the model's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh()) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x + F.dropout(layer(x), 0.2, self.training)
            if index == 1:
                x = layer(x)
        return x


def chain(layers: int = 4) -> nn.Sequential:
    """A plain perceptron."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))


# -- cases -------------------------------------------------------------------------------------------------------------


def numbers(step: int, batch: int) -> tuple[torch.Tensor, ...]:
    """Inputs and targets, ``[batch, width]`` each."""
    generator = torch.Generator().manual_seed(500 + step)
    return tuple(torch.randn(batch, WIDTH, generator=generator) for _ in range(2))


def varying_tokens(step: int, batch: int) -> tuple[torch.Tensor, ...]:
    """Token batches whose length changes from step to step, and comes back."""
    return token_batch(step, batch, seq=(5, 3, 7)[step % 3 if step < 9 else 0])


def _squared(model: Callable[..., Any], x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
    out = model(x)
    value = out.value if isinstance(out, Pair) else out
    return F.mse_loss(value, y), out


def _entropy(model: Callable[..., Any], ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, Any]:
    out = model(ids)
    return loss_of(out, targets), out


def _two_calls(model: Callable[..., Any], x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
    first = model(x)
    second = model(first * 0.5)
    return F.mse_loss(second, y) + first.square().mean(), (first, second)


def _language(model: Callable[..., Any], ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
    out = model(input_ids=ids, labels=ids)
    return out.loss, out.logits


def _words(step: int, batch: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(1, 31, (batch, 6), generator=torch.Generator().manual_seed(step)),)


class Case(NamedTuple):
    """A model and how it is trained.

    Attributes:
        build: makes it, with the generator's present state.
        batch: ``batch(step, size)``, the arguments of a step.
        loss: ``loss(model, *batch)`` gives the loss and what else the step returns.
        together: paths of modules that must share a stage.
        depth: modules so deep are placed one by one in a manual partition, with all that is in them.
        rate: learning rate; where gradients are tiny, a high one makes rounding grow from step to step.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[torch.Tensor, ...]] = numbers
    loss: Callable[..., tuple[torch.Tensor, Any]] = _squared
    together: tuple[str, ...] = ()
    depth: int = 99
    rate: float = 1e-2


def _gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(vocab_size=31, n_positions=16, n_embd=16, n_layer=3, n_head=2, **rates))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=16))


def _bert(dropout: float = 0.0) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForMaskedLM(BertConfig(**sizes, **rates, num_attention_heads=2, max_position_embeddings=16))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


PLAIN: dict[str, Case] = {
    "mlp": Case(chain),
    "residual": Case(Residual),
    "branching": Case(Branching),
    "twice": Case(Twice),
    "recurrent": Case(Recurrent),
    "tied": Case(lambda: TiedNet(3), token_batch, _entropy, ("embedding", "head")),
    "lengths": Case(lambda: TiedNet(2), varying_tokens, _entropy, ("embedding", "head")),
    "normed": Case(Normed),
    "containers": Case(Containers),
    "mutating": Case(Mutating),
    "inplace": Case(InPlace),
    "unused": Case(Unused),
    "two_calls": Case(chain, loss=_two_calls),
}
TRANSFORMERS: dict[str, Case] = {
    "gpt2": Case(_gpt2, _words, _language, ("transformer.wte", "lm_head"), 4, 1e-3),
    "llama": Case(_llama, _words, _language, (), 4, 1e-3),
    "bert": Case(
        _bert,
        _words,
        _language,
        ("bert.embeddings", "cls.predictions", "cls.predictions.decoder", "bert.embeddings.word_embeddings"),
        4,
        1e-3,
    ),
    "t5": Case(
        _t5,
        _words,
        _language,
        ("shared", "lm_head", "encoder", "decoder", "encoder.embed_tokens", "decoder.embed_tokens"),
        5,
        1e-3,
    ),
}
DROPPING: dict[str, Case] = {
    "dropping": Case(Dropping),
    "gpt2_dropping": TRANSFORMERS["gpt2"]._replace(build=functools.partial(_gpt2, 0.2)),
}
CASES = {**PLAIN, **TRANSFORMERS, **DROPPING}


def built(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A case's model, the same weights every time."""
    torch.manual_seed(3)
    return CASES[name].build().to(dtype)


def scattered(model: nn.Module, case: Case, stages: int) -> dict[str, int]:
    """The most unpleasant placement: each module on another stage than its parent and the one before it."""
    paths = [path for path, _ in model.named_modules() if path.count(".") < case.depth]
    placement = {path: index % stages for index, path in enumerate(paths)}
    return {**placement, **dict.fromkeys(case.together, 0)}
