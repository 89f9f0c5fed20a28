"""Nets for pictures, sound and sequences, and how one process and the ranks of a job train them alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.training.rank_training import training_step, updates
from support.training.reference import Alone, divided

STEPS, BATCH, RATE = 3, 8, 0.1
SHARDED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 20, "sdp_gradient_clipping": 1e9}
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}
#: By name the number of ranks, and the parameters beside ``ddp``.
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "pp 2": (2, PIPELINE),
    "sdp 2": (2, SHARDED),
    "pp 2 × sdp 2": (4, {**PIPELINE, **SHARDED}),
}


class Net(NamedTuple):
    """A net and its data."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[torch.Tensor, ...]]
    loss: Callable[..., torch.Tensor]


def batches(net: Net) -> list[tuple[torch.Tensor, ...]]:
    """Whole ones, the same on all ranks."""
    return [net.batch(torch.Generator().manual_seed(step)) for step in range(STEPS)]


def made(net: Net) -> nn.Module:
    """The net with the weights of a fixed seed."""
    torch.manual_seed(0)
    return net.make()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def trained_in_job(net: Net, tensor_parallel: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, at the end that of an evaluation, and the state; runs in a rank."""
    import smdistributed.modelparallel.torch as smp

    with smp.model_creation(tensor_parallelism=tensor_parallel):
        original = made(net)
    model = smp.DistributedModel(original)
    optimizer = smp.DistributedOptimizer(sgd(model.parameters()))
    losses = list(updates(training_step(model, net.loss), optimizer, batches(net)))
    own = sum(p.numel() for p in model.local_parameters())
    assert smp.pp_size() == 1 or 0 < own < sum(p.numel() for p in model.parameters())
    evaluate = smp.step(lambda *batch: net.loss(model, *batch))
    model.eval()
    with torch.no_grad():
        losses.append(float(evaluate(*batches(net)[0]).reduce_mean()))
    return losses, model.state_dict()


def check(
    results: list[tuple[list[float], dict[str, torch.Tensor]]],
    net: Net,
    *,
    microbatches: int = 1,
    replicas: int = 1,
    buffers: bool = True,
) -> None:
    """Losses to 1e-5, and weights so that gradients are right to 1e-4."""
    alone = Alone(made(net), sgd)
    for batch in batches(net):
        alone.step(divided(batch, microbatches, replicas), net.loss)
    state = {name: value.clone() for name, value in alone.model.state_dict().items()}
    pieces = divided(batches(net)[0], microbatches)
    for (*losses, evaluated), found in results:
        assert losses == pytest.approx(alone.losses, abs=1e-5)
        for name, value in state.items():
            if buffers or name in alone.weights:
                torch.testing.assert_close(
                    found[name], value, atol=1e-4 * RATE, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
                )
        alone.model.load_state_dict(found)  # with the running statistics of its own batches
        assert evaluated == pytest.approx(_evaluated(alone.model.eval(), net, pieces), abs=1e-5)


@torch.no_grad()
def _evaluated(model: nn.Module, net: Net, pieces: list[tuple[torch.Tensor, ...]]) -> float:
    return sum(float(net.loss(model, *piece)) for piece in pieces) / len(pieces)


# -- nets of PyTorch's own modules -------------------------------------------------------------------------------------


class Block(nn.Module):
    """Of a residual net: two convolutions with batch norm, and a projection where the shape changes."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module | None = None
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.second_norm(self.second(self.relu(self.first_norm(self.first(x)))))
        out += x if self.shortcut is None else self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """A stem, three stages that halve the picture, mean pooling and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(2)
        self.stages = nn.ModuleList(
            nn.Sequential(Block(inside, outside, stride), Block(outside, outside, 1))
            for inside, outside, stride in ((8, 8, 1), (8, 16, 2), (16, 32, 2))
        )
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.stem(x))
        for stage in self.stages:
            x = stage(x)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Classifier(nn.Module):
    """``nn.TransformerEncoder`` between an embedding and a head, with a mask for padding."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(43, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(16), enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(self.embedding(ids), src_key_padding_mask=ids == 0)
        return self.head(hidden[:, 0])


class Translator(nn.Module):
    """``nn.Transformer``, whose sequences come before the batch, under a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(43, 16)
        self.transformer = nn.Transformer(16, 4, 2, 2, 32, dropout=0.0)
        self.head = nn.Linear(16, 43)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        given, wanted = (self.embedding(ids).transpose(0, 1) for ids in (source, target))
        mask = nn.Transformer.generate_square_subsequent_mask(len(wanted))
        return self.head(self.transformer(given, wanted, tgt_mask=mask, tgt_is_causal=True)).transpose(0, 1)


class Attending(nn.Module):
    """``nn.MultiheadAttention`` of itself, and of another sequence whose keys and values have other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.memory = nn.Embedding(43, 16), nn.Embedding(43, 12)
        self.own = nn.MultiheadAttention(16, 4, batch_first=True)
        self.cross = nn.MultiheadAttention(16, 2, kdim=12, vdim=12, batch_first=True, add_bias_kv=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 43)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x, memory = self.embedding(target), self.memory(source)
        x = x + self.own(x, x, x, need_weights=False)[0]
        seen, weights = self.cross(self.norm(x), memory, memory, key_padding_mask=source == 0)
        return self.head(x + seen) + weights.mean()


def _classes(model: nn.Module, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), classes)


def _next_tokens(model: nn.Module, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(source, target).flatten(0, 1), target.flatten())


def _pictures(size: int) -> Callable[[torch.Generator], tuple[torch.Tensor, ...]]:
    return lambda g: (torch.randn(BATCH, 3, size, size, generator=g), torch.randint(5, (BATCH,), generator=g))


def _padded(generator: torch.Generator) -> torch.Tensor:
    ids = torch.randint(1, 43, (BATCH, 7), generator=generator)
    ids[:, -2:] *= torch.randint(2, (BATCH, 1), generator=generator)
    return ids


def _pairs(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return _padded(generator), torch.randint(1, 43, (BATCH, 5), generator=generator)


def _labelled(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return _padded(generator), torch.randint(5, (BATCH,), generator=generator)


TORCH_NETS = {
    "ResNet": Net(ResNet, _pictures(16), _classes),
    "TransformerEncoder": Net(lambda: Classifier(norm_first=False), _labelled, _classes),
    "TransformerEncoder, norm first": Net(lambda: Classifier(norm_first=True), _labelled, _classes),
    "Transformer": Net(Translator, _pairs, _next_tokens),
    "MultiheadAttention": Net(Attending, _pairs, _next_tokens),
}


# -- nets of Transformers ----------------------------------------------------------------------------------------------

_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_DEPTH = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
_PICTURE = {"image_size": 8, "patch_size": 4, **_DEPTH}


def _vit(head: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers as hf

        return getattr(hf, f"ViTFor{head}")(hf.ViTConfig(**_PICTURE, **_STILL, num_labels=5, encoder_stride=4))

    return make


def _clip() -> nn.Module:
    import transformers as hf

    text = {**_DEPTH, "vocab_size": 43, "max_position_embeddings": 16, "eos_token_id": 42, "bos_token_id": 1}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=_PICTURE, projection_dim=16))


def _clip_classifier() -> nn.Module:
    import transformers as hf

    return hf.CLIPForImageClassification(hf.CLIPConfig(vision_config=_PICTURE, text_config=_DEPTH, num_labels=5))


def whisper() -> nn.Module:
    """An encoder of sound with a decoder of text."""
    import transformers as hf

    halves = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
    sides = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in halves.items()}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"max_source_positions": 12, "max_target_positions": 16, "num_mel_bins": 8}
    config = hf.WhisperConfig(
        **sides,
        **tokens,
        **lengths,
        d_model=32,
        vocab_size=43,
        dropout=0.0,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    return hf.WhisperForConditionalGeneration(config)


def _wav2vec2(head: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers as hf

        ears = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
        places = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
        dropouts = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
        still = {**dict.fromkeys((*dropouts, "layerdrop"), 0.0), "apply_spec_augment": False}
        labels = {"vocab_size": 11, "num_labels": 5, "classifier_proj_size": 16}
        config = hf.Wav2Vec2Config(**_DEPTH, **ears, **places, **still, **labels, ctc_loss_reduction="mean")
        return getattr(hf, f"Wav2Vec2For{head}")(config)

    return make


def _own_loss(*names: str, **more: Any) -> Callable[..., torch.Tensor]:
    return lambda model, *given: model(**dict(zip(names, given, strict=True)), **more).loss


def _texts_and_pictures(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    ids = torch.randint(2, 42, (BATCH, 7), generator=generator)
    ids[:, -1] = 42
    return ids, torch.randn(BATCH, 3, 8, 8, generator=generator)


def _patches(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randn(BATCH, 3, 8, 8, generator=generator), torch.randint(2, (BATCH, 4), generator=generator).bool()


def _sound(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randn(BATCH, 8, 24, generator=generator), torch.randint(3, 43, (BATCH, 6), generator=generator)


def _waves(labels: Callable[[torch.Generator], torch.Tensor]) -> Callable[[torch.Generator], tuple[torch.Tensor, ...]]:
    return lambda g: (torch.randn(BATCH, 400, generator=g), labels(g))


_CLASSIFIED = _own_loss("pixel_values", "labels")
_HEARD = _own_loss("input_values", "labels")
TRANSFORMERS_NETS = {
    "ViT classifier": Net(_vit("ImageClassification"), _pictures(8), _CLASSIFIED),
    "ViT masked pictures": Net(_vit("MaskedImageModeling"), _patches, _own_loss("pixel_values", "bool_masked_pos")),
    "CLIP": Net(_clip, _texts_and_pictures, _own_loss("input_ids", "pixel_values", return_loss=True)),
    "CLIP classifier": Net(_clip_classifier, _pictures(8), _CLASSIFIED),
    "Whisper": Net(whisper, _sound, _own_loss("input_features", "labels")),
    "Wav2Vec2 CTC": Net(_wav2vec2("CTC"), _waves(lambda g: torch.randint(1, 11, (BATCH, 4), generator=g)), _HEARD),
    "Wav2Vec2 classifier": Net(
        _wav2vec2("SequenceClassification"), _waves(lambda g: torch.randint(5, (BATCH,), generator=g)), _HEARD
    ),
}
