"""Models that a case trains, with their batches and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from crossings import own_nets as own
from crossings.own_nets import VOCABULARY, WIDTH, Perceptron
from torch import nn

LENGTH = 6

Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Net:
    """A model and what it trains on.

    Attributes:
        make: the model, with the next random numbers.
        batch: ``batch(step, size, length)``: the samples of a step, float32 or whole numbers.
        loss: ``loss(model, *batch)``: a mean over samples.
        layers: the attribute that has the list of its blocks.
        branches: whether the samples decide which of its modules run.
        varies: whether samples may have another length.
        from_transformers: whether the library makes it.
        generates: whether it has a method ``generate``.
        packs: whether positions that begin again separate documents, which its loss takes as the last of a batch.
        writes: parameters into which its forward pass writes other values with each call.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]
    loss: Callable[..., torch.Tensor]
    layers: str = "layers"
    branches: bool = False
    varies: bool = False
    from_transformers: bool = False
    generates: bool = False
    packs: bool = False
    writes: tuple[str, ...] = ()

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The blocks of a model that :attr:`make` has made."""
        found = dict(model.named_modules()).get(self.layers)
        if found is None:  # the distributed form of a model has them elsewhere
            lists = (module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential))
            found = max(lists, key=len)
        return list(found.children())


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(500 + step)


def _vectors(step: int, size: int, length: int) -> Batch:
    draw = _generator(step)
    return torch.randn(size, length, WIDTH, generator=draw), torch.randn(size, length, WIDTH, generator=draw)


def _images(step: int, size: int, length: int) -> Batch:
    draw = _generator(step)
    return torch.randn(size, 3, 8, 8, generator=draw), torch.randint(4, (size,), generator=draw)


def _tokens(step: int, size: int, length: int) -> Batch:
    found = torch.randint(VOCABULARY, (size, length + 1), generator=_generator(step))
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def document_positions(step: int, size: int, length: int) -> torch.Tensor:
    """Return positions of samples that are two documents each, of other lengths in each sample."""
    ends = torch.randint(1, length, (size, 1), generator=_generator(step))
    places = torch.arange(length).expand(size, length)
    return torch.where(places < ends, places, places - ends)


def _square(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (model(x) - target).square().mean()


def _classes(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(_wide(model(x)), target)


def _next_token(model: nn.Module, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(_wide(model(ids)).flatten(0, 1), target.flatten())


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype.itemsize == 2 else logits


def _late_batch(step: int, size: int, length: int) -> Batch:
    x, target = _vectors(step, size, length)
    return x, target, torch.full((size,), step % 3 == 2)


def _late_loss(model: nn.Module, x: torch.Tensor, target: torch.Tensor, uses: torch.Tensor) -> torch.Tensor:
    return (model(x, uses) - target).square().mean()


def _image_model(name: str, layers: str, **settings: Any) -> Net:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(image_size=8, patch_size=4, num_labels=4, **settings)
        return transformers.AutoModelForImageClassification.from_config(config)

    def loss(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(_wide(model(pixel_values=x)[0]), target)

    return Net(make, _images, loss, layers, from_transformers=True)


def _of_transformers(name: str, layers: str, **settings: Any) -> Net:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(
            vocab_size=VOCABULARY, use_cache=False, tie_word_embeddings=False, **settings
        )
        return transformers.AutoModelForCausalLM.from_config(config)

    def loss(
        model: nn.Module, ids: torch.Tensor, target: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        given = {} if positions is None else {"position_ids": positions}
        found: torch.Tensor = F.cross_entropy(_wide(model(input_ids=ids, **given)[0]).flatten(0, 1), target.flatten())
        return found

    return Net(make, _tokens, loss, layers, varies=True, from_transformers=True, generates=True, packs=True)


_GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
_LLAMA = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}

NETS: dict[str, Net] = {
    "perceptron": Net(Perceptron, _vectors, _square, varies=True),
    "images": Net(own.Images, _images, _classes),
    "skips": Net(own.Skips, _images, _classes),
    "recurrent": Net(own.Recurrent, _vectors, _square, varies=True),
    "tied": Net(own.Tied, _tokens, _next_token, varies=True),
    "nested": Net(own.Nested, _vectors, _square, varies=True),
    "late_head": Net(own.LateHead, _late_batch, _late_loss),
    "forked": Net(own.Forked, _vectors, _square, branches=True, varies=True),
    "buffered": Net(own.Buffered, _vectors, _square, varies=True),
    "initialised": Net(own.Initialised, _vectors, _square, varies=True),
    "gains": Net(lambda: Perceptron(own.Gain), _vectors, _square, varies=True),
    "normed": Net(lambda: Perceptron(own.Normed, 3), _vectors, _square, varies=True),
    "pruned": Net(lambda: Perceptron(own.Pruned, 3), _vectors, _square, varies=True),
    "recomputed": Net(lambda: Perceptron(own.Recomputed), _vectors, _square, varies=True),
    "clamped": Net(own.Clamped, _vectors, _square, varies=True),
    "follower": Net(
        lambda: Perceptron(own.Following, 3),
        _vectors,
        _square,
        varies=True,
        writes=tuple(f"layers.{i}.teacher.{name}" for i in range(3) for name in ("weight", "bias")),
    ),
    "chained": Net(own.Chained, _vectors, _square, varies=True),
    "flexible": Net(lambda: Perceptron(lambda: own.Documents(own.attend_flexibly), 2), _vectors, _square, varies=True),
    "ranges": Net(lambda: Perceptron(lambda: own.Documents(own.attend_to_ranges), 2), _vectors, _square, varies=True),
    "adapters": Net(own.Adapters, _vectors, _square, varies=True),
    "mixture": Net(lambda: Perceptron(own.Expert, 2), _vectors, _square, varies=True),
    "gpt2": _of_transformers("GPT2", "transformer.h", **_GPT2, **_NO_DROPOUT),
    "llama": _of_transformers("Llama", "model.layers", num_key_value_heads=2, **_LLAMA),
    "averaging": Net(own.Averaging, _vectors, _square, varies=True),
    "vit": _image_model(
        "ViT",
        "vit.encoder.layer",
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
    "mixtral": _of_transformers(
        "Mixtral", "model.layers", num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, **_LLAMA
    ),
    "neox": _of_transformers("GPTNeoX", "gpt_neox.layers", **_LLAMA),
}
