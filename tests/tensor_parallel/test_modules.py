"""Module by module: outputs and every gradient equal the public page's reference, however activations lie."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.matrix import sampled

SIZES = {"num_attention_heads": 8, "attention_head_size": 4, "hidden_size": 32, "intermediate_size": 48}
QUIET = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
PRE = {"pre_layernorm": True, "post_layernorm": False}
BATCH = 4


def _config(degree, optimize, prescaled):
    return {"tensor_parallel_degree": degree, "ddp": True, "optimize": optimize, "prescaled_batch": prescaled}


def _filled(module):
    """Random values everywhere: what starts at 0 or 1 would hide mistakes."""
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


def _compare_on_rank(kind, settings, make_inputs):
    """One rank's part: its module against the reference on the whole batch."""
    from support.models import plain_transformer as reference
    from support.training.closeness import close

    import smdistributed.modelparallel.torch as smp
    from smp_config import Group
    from smp_runtime.module_conversion.parameter_layout import slices_by_name
    from smp_runtime.tensor_parallel.group import gather_whole

    names = {
        "attention": (reference.Attention, smp.nn.DistributedAttentionLayer),
        "output": (reference.Output, smp.nn.DistributedTransformerOutputLayer),
        "layer": (reference.Layer, smp.nn.DistributedTransformerLayer),
        "transformer": (reference.Transformer, smp.nn.DistributedTransformer),
        "linear": (torch.nn.Linear, smp.nn.DistributedLinear),
        "embedding": (torch.nn.Embedding, smp.nn.DistributedEmbedding),
        "lm_head": (reference.LMHead, smp.nn.DistributedTransformerLMHead),
    }
    make_reference, make_ours = names[kind]
    extra = settings.get("_ours", {})
    settings = {name: value for name, value in settings.items() if name != "_ours"}
    expected_module = _filled(make_reference(**settings))
    ours = make_ours(**(settings if kind in ("linear", "embedding") else {**QUIET, **settings}), **extra)
    ours.load_state_dict(expected_module.state_dict(), strict=True)

    inputs = make_inputs()
    group = ours.tensor_group
    share = BATCH // (1 if group.prescaled else group.size)
    mine = slice(0, BATCH) if group.prescaled else slice(group.rank * share, (group.rank + 1) * share)

    def leaf(tensor, part=slice(None)):
        made = tensor[part].clone()
        return made.requires_grad_() if made.is_floating_point() and tensor.dim() == 3 else made

    def each(value, part):
        if isinstance(value, tuple):
            return tuple(each(v, part) for v in value)
        return leaf(value, part) if isinstance(value, torch.Tensor) else value

    whole, part = each(inputs, slice(None)), each(inputs, mine)
    expected, got = expected_module(whole), ours(part)
    if isinstance(expected, tuple):
        expected, got = expected[0], got[0]
    if expected.dim() == 0:  # a loss: the mean over ranks is the mean of the whole batch
        expected.backward()
        (got / (1 if group.prescaled else group.size)).backward()
        total = got.detach().clone()
        if not group.prescaled:
            total = group.all_reduce(total) / group.size
        close(total, expected.detach())
    else:
        cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
        expected.backward(cotangent)
        got.backward(cotangent[mine])
        close(got, expected[mine])

    flat = lambda value: value if isinstance(value, tuple) else (value,)  # noqa: E731
    for theirs, our in zip(flat(whole), flat(part), strict=True):
        if isinstance(theirs, torch.Tensor) and theirs.requires_grad:
            close(our.grad, theirs.grad[mine])
    slices, gradients = slices_by_name(ours), {n: p.grad for n, p in expected_module.named_parameters()}
    for name, parameter in ours.named_parameters():
        gradient = parameter.grad
        owner, _, own_name = name.rpartition(".")
        if name in slices:
            gradient = gather_whole(gradient, slices[name], group)
        elif ours.get_submodule(owner).reductions[own_name] is Group.DP and not group.prescaled:
            gradient = group.all_reduce(gradient.clone())
        close(gradient, gradients[name], name)


def _hidden(seed, seq=6):
    return torch.randn(BATCH, seq, SIZES["hidden_size"], generator=torch.Generator().manual_seed(seed))


def _mask(seq=6):
    mask = torch.zeros(BATCH, 1, 1, seq)
    mask[1, ..., -2:] = torch.finfo(torch.float32).min
    mask[3, ..., -1:] = torch.finfo(torch.float32).min
    return mask


def _ids(vocabulary, seed=5, seq=6):
    return torch.randint(vocabulary, (BATCH, seq), generator=torch.Generator().manual_seed(seed))


CASES = {
    "linear": ("linear", {"in_features": 32, "out_features": 12}, lambda: _hidden(1)),
    "linear without bias": ("linear", {"in_features": 32, "out_features": 12, "bias": False}, lambda: _hidden(1)),
    "embedding": ("embedding", {"num_embeddings": 11, "embedding_dim": 16}, lambda: _ids(11)),
    "attention": ("attention", {**SIZES}, lambda: (_hidden(1), _mask())),
    "attention without mask": ("attention", {**SIZES}, lambda: (_hidden(1), None)),
    "causal attention before": ("attention", {**SIZES, **PRE, "causal_mask_size": 9}, lambda: (_hidden(1), None)),
    "causal and masked": ("attention", {**SIZES, "causal_mask_size": 9}, lambda: (_hidden(1), _mask())),
    "alibi": ("attention", {**SIZES, **PRE, "use_alibi": True, "causal_mask_size": 9}, lambda: (_hidden(1), _mask())),
    "alibi everywhere": ("attention", {**SIZES, "use_alibi": True}, lambda: (_hidden(1), None)),
    "wider heads": ("attention", {**SIZES, "attention_head_size": 6}, lambda: (_hidden(1), _mask())),
    "cross attention": (
        "attention",
        {**SIZES, "cross_attention": True},
        lambda: (_hidden(1), _hidden(2, seq=5), _mask(5)),
    ),
    "output": ("output", {**SIZES}, lambda: _hidden(1)),
    "output before": ("output", {**SIZES, **PRE, "activation": "relu"}, lambda: _hidden(1)),
    "odd sequence": ("layer", {**SIZES}, lambda: (_hidden(1, 5), None)),
    "odd sequence, causal": ("layer", {**SIZES, **PRE, "causal_mask_size": 5}, lambda: (_hidden(1, 5), _mask(5))),
    "layer, norms on both sides": ("layer", {**SIZES, "pre_layernorm": True}, lambda: (_hidden(1), _mask())),
    "layer in fp32": (
        "layer",
        {
            **SIZES,
            "_ours": {"attention_in_fp32": True, "fp32_residual_addition": True, "query_key_layer_scaling": True},
        },
        lambda: (_hidden(1), _mask()),
    ),
    "layer with cross attention": (
        "layer",
        {**SIZES, **PRE, "add_cross_attention": True, "causal_mask_size": 9},
        lambda: (_hidden(1), _hidden(2, 5), _mask(), _mask(5)),
    ),
    "transformer": ("transformer", {**SIZES, "num_layers": 3}, lambda: (_hidden(1), _mask())),
    "language model": (
        "lm_head",
        {**SIZES, **PRE, "num_layers": 2, "vocab_size": 37, "num_positions": 8, "causal_mask_size": 8},
        lambda: (_ids(37), None, None, None, _ids(37)),
    ),
    "language model, vocabulary split": (
        "lm_head",
        {
            **SIZES,
            **PRE,
            "num_layers": 2,
            "vocab_size": 37,
            "num_positions": 8,
            "causal_mask_size": 8,
            "_ours": {"distribute_embedding": True},
        },
        lambda: (_ids(37), None, None, None, _ids(37)),
    ),
    "logits, vocabulary split": (
        "lm_head",
        {
            **SIZES,
            "num_layers": 1,
            "vocab_size": 37,
            "num_positions": 8,
            "num_token_types": 2,
            "_ours": {"distribute_embedding": True},
        },
        lambda: (_ids(37), _ids(2, 8).mul(0).index_fill(1, torch.tensor([5]), 1), _ids(2, 9), _ids(8, 10), None),
    ),
}
MODES = list(itertools.product((2, 4), ("speed", "memory"), (True, False)))
#: Every value of each, and what is sent at the ends of a module both ways.
SAMPLE = {(2, "speed", True), (2, "memory", False), (2, "memory", True), (4, "speed", False)}


def _all_cases(names):
    for name in names:
        kind, settings, make_inputs = CASES[name]
        try:
            _compare_on_rank(kind, settings, make_inputs)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize(
    ("degree", "optimize", "prescaled"),
    sampled(MODES, SAMPLE),
)
def test_outputs_and_gradients_equal_the_reference(ranks, degree, optimize, prescaled):
    ranks(_all_cases, degree, list(CASES), config=_config(degree, optimize, prescaled))
