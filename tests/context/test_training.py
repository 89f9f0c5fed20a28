"""Training over ranks that share sequences out is training in one process, beside each other strategy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.matrix import sampled
from support.models.long_sequences import WORDS, CausalNet, next_word_loss, word_batches
from support.training.rank_training import training_step, updates
from support.training.reference import train_alone
from torch import nn
from torch.nn import functional

STEPS = 2


def _optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def _attend_flexibly(query, key, value, is_causal):
    from torch.nn.attention import flex_attention as flex

    length = query.shape[2]
    mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cpu")
    return flex.flex_attention(query, key, value, block_mask=mask)


def _attend_to_packed(query, key, value, is_causal):
    """Attention of each sample, as one document among packed ones."""
    from torch.nn.attention import varlen

    length = query.shape[2]
    ends = torch.tensor([0, length], dtype=torch.int32)
    samples = [
        varlen.varlen_attn(
            *(each[place].transpose(0, 1) for each in (query, key, value)),
            ends,
            ends,
            length,
            length,
            window_size=(-1, 0),
        )
        for place in range(query.shape[0])
    ]
    return torch.stack(samples).transpose(1, 2)


ATTENTIONS = {"flex": _attend_flexibly, "varlen": _attend_to_packed}


def _train_with(attention, *args):
    """One rank's part, with another attention in the model's code."""
    from support.models import long_sequences

    before = long_sequences.functional
    long_sequences.functional = SimpleNamespace(
        scaled_dot_product_attention=ATTENTIONS[attention], cross_entropy=before.cross_entropy
    )
    try:
        return _train(*args)
    finally:
        long_sequences.functional = before


def _train(steps, dtype, batch, marks):
    """One rank's part; runs inside a rank process."""
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(smp.rank())
    model = CausalNet().to(dtype)
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(model)
    model = smp.DistributedModel(model)
    if marks:
        for block in model.module.blocks:
            smp.set_activation_checkpointing(block)
    optimizer = smp.DistributedOptimizer(_optimizer(model.parameters()))
    losses = list(updates(training_step(model, next_word_loss), optimizer, word_batches(steps, batch)))
    state = model.state_dict()
    return {
        "losses": losses,
        "state": {name: value.clone() for name, value in state.items()},
        "cp": (smp.cp_rank(), smp.dp_rank()),
    }


CASES = {
    "alone": (2, {}),
    "three": (3, {}),
    "four": (4, {}),
    "beside replicas": (4, {"context_parallel_degree": 2}),
    "microbatches": (2, {"microbatches": 2}),
    "state": (2, {"shard_optimizer_state": True}),
    "sharded": (
        2,
        {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 1e6},
    ),
    "sharded and replicas": (
        4,
        {
            "sharded_data_parallel_degree": 4,
            "context_parallel_degree": 2,
            "sdp_param_persistence_threshold": 0,
            "sdp_gradient_clipping": 1e6,
        },
    ),
    "pipeline": (4, {"context_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 2}),
    "pipeline and checkpointing": (
        4,
        {"context_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 4, "checkpointing": True},
    ),
    # PyTorch trains these entry points on GPUs only, and a rank that traces runs the model alone.
    "pipeline and checkpointing, untraced": (
        4,
        {
            "context_parallel_degree": 2,
            "pipeline_parallel_degree": 2,
            "microbatches": 4,
            "checkpointing": True,
            "skip_tracing": True,
        },
    ),
    "zero bubble": (
        4,
        {"context_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": "zero_bubble"},
    ),
    "tensor": (
        4,
        {"context_parallel_degree": 2, "tensor_parallel_degree": 2, "prescaled_batch": True, "optimize": "speed"},
    ),
    "tensor, activations divided": (
        4,
        {"context_parallel_degree": 2, "tensor_parallel_degree": 2, "prescaled_batch": True},
    ),
    "checkpointing": (2, {"checkpointing": True}),
    "offload": (2, {"checkpointing": True, "offload_activations": True, "microbatches": 2}),
}


SAMPLE = {
    "alone",
    "beside replicas",
    "microbatches",
    "state",
    "sharded",
    "pipeline",
    "tensor",
    "checkpointing",
    "offload",
}


@pytest.mark.parametrize("case", sampled(CASES, SAMPLE))
def test_losses_and_parameters_equal_one_process(ranks, case):
    _compare(ranks, case, _train)


#: Other entry points of attention, and other strategies beside them.
ENTRIES = [
    ("flex", "alone"),
    ("flex", "three"),
    ("flex", "tensor"),
    ("flex", "pipeline and checkpointing, untraced"),
    ("varlen", "tensor"),
    ("varlen", "pipeline and checkpointing, untraced"),
]


@pytest.mark.parametrize(("attention", "case"), sampled(ENTRIES, ENTRIES[1::2]))
def test_other_entry_points_beside_other_strategies(ranks, attention, case):
    if attention == "varlen":
        pytest.importorskip("torch.nn.attention.varlen")
    _compare(ranks, case, _train_with, attention)


def _compare(ranks, case, train, *first):
    world, given = CASES[case]
    config = {"ddp": True, "context_parallel_degree": world, **given}
    marks = config.pop("checkpointing", False)
    expected = train_alone(CausalNet().double(), _optimizer, word_batches(STEPS, 4), next_word_loss)
    for result in ranks(train, world, *first, STEPS, torch.float64, 4, marks, config=config):
        assert result["losses"] == pytest.approx(expected.losses, abs=1e-9)
        for name, value in expected.model.state_dict().items():
            torch.testing.assert_close(
                result["state"][name], value, atol=1e-9, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
            )


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(11)
    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 24, "use_cache": False}
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, tie_word_embeddings=False)).double()


def _gpt2_loss(model, tokens):
    return next_word_loss(lambda given: model(input_ids=given)[0], tokens)


class TokenMixer(nn.Module):
    """A linear layer over the tokens, whose number is fixed, between two over the features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.enter, self.mix, self.leave = nn.Embedding(WORDS, 16), nn.Linear(24, 24), nn.Linear(16, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(tokens)
        return self.leave(hidden + torch.relu(self.mix(hidden.transpose(1, 2))).transpose(1, 2))


def _mixer_loss(model, tokens):
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(1).flatten())


#: A model, its loss, and the lengths of its samples: those that four ranks divide, others, and few positions on each rank.
DIVIDED = {
    "blocks": (_gpt2, _gpt2_loss, (24, 16)),
    "blocks, lengths that ranks do not divide": (_gpt2, _gpt2_loss, (21, 23)),
    "blocks, few tokens": (_gpt2, _gpt2_loss, (6, 5)),
    "tokens mixed": (lambda: TokenMixer().double(), _mixer_loss, (24, 24)),
}


def _train_divided(case):
    """Train by tensor parallelism; return losses, weights, what was gathered, and the shapes of what the blocks return."""
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.context.exchange import ContextGroup

    make, loss, lengths = DIVIDED[case]
    net = make()
    smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net)
    shapes = []
    for module in model.module.modules():
        if type(module).__name__ == "DistributedTransformerLayer":
            module.register_forward_hook(lambda _module, _given, made: shapes.append(tuple(made[0].local.shape)))
    optimizer = smp.DistributedOptimizer(_optimizer(model.parameters()))
    losses = list(updates(training_step(model, loss), optimizer, word_batches(STEPS, 4, lengths)))
    session = smp.init()
    whole = session.module_manager.translated(model.state_dict(), model.module)
    state = {name: value.clone() for name, value in whole.items()}
    return losses, state, dict(ContextGroup.of(session).gathered), shapes


@pytest.mark.parametrize("optimize", ["memory", "speed"])
@pytest.mark.parametrize("case", DIVIDED)
def test_tensor_parallelism_divides_the_slices_of_sequences(ranks, case, optimize):
    config = {"ddp": True, "context_parallel_degree": 2, "tensor_parallel_degree": 2, "prescaled_batch": True}
    make, loss, lengths = DIVIDED[case]
    expected = train_alone(make(), _optimizer, word_batches(STEPS, 4, lengths), loss)
    everyone = ranks(_train_divided, 4, case, config={**config, "optimize": optimize})
    for losses, state, gathered, _ in everyone:
        assert losses == pytest.approx(expected.losses, abs=1e-9)
        for name, value in expected.model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-9, rtol=1e-9)
        assert gathered == {} or case == "tokens mixed"
    if case != "tokens mixed":
        # Each tensor parallel rank has half of a context rank's positions between layers, or all of them.
        most = max(-(-length // 2) for length in lengths)
        kept = max(shape[1] for *_, shapes in everyone for shape in shapes)
        assert kept == (-(-most // 2) if optimize == "memory" else most)
