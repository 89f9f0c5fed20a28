"""Hugging Face's models under ``smp.tensor_parallelism()``: the same answers and gradients, the same states back."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from support.models.replaced import VOCABULARY, original_of, translations_of

MODELS = [
    "gpt2",
    "gpt2 flags",
    "gptj",
    "gptneo",
    "gptneox",
    "gptneox in turn",
    "llama",
    "llama tied",
    "bert",
    "roberta",
]
BATCH, SEQ = 4, 8


def _config(degree, optimize, prescaled):
    return {"tensor_parallel_degree": degree, "ddp": True, "optimize": optimize, "prescaled_batch": prescaled}


def _batch(masked):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (BATCH, SEQ), generator=generator)
    labels = torch.randint(3, VOCABULARY, (BATCH, SEQ), generator=generator)
    mask = torch.ones(BATCH, SEQ, dtype=torch.long)
    if masked:  # the same number of tokens counts for every rank, so that means of means are means
        mask[:, -2:] = 0
        labels[:, -2:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _check(name, overrides=None, masked=True):
    import logging

    from support.logs import logged
    from support.training.closeness import close

    import smdistributed.modelparallel.torch as smp

    original = original_of(name)
    with logged(logging.NOTSET) as said:
        with smp.tensor_parallelism(**(overrides or {})):
            to_distribute = type(original)(original.config)
        to_distribute.load_state_dict(original.state_dict())
        model = smp.DistributedModel(to_distribute)
    to_ours, to_theirs = translations_of(name)
    for loads in (False, True):  # its weights went into the distributed form, and they can be loaded into that
        if loads:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            model.load_state_dict(to_ours(original.state_dict()))
        back = to_theirs(model.state_dict())
        expected_state = original.state_dict()
        assert set(back) == set(expected_state), set(back) ^ set(expected_state)
        for key, value in expected_state.items():
            assert torch.equal(back[key], value), (key, loads)

    batch = _batch(masked)
    prescaled = smp.state.cfg.prescaled_batch
    share = BATCH // (1 if prescaled else smp.tp_size())
    mine = slice(0, BATCH) if prescaled else slice(smp.tp_rank() * share, (smp.tp_rank() + 1) * share)
    original.train(), model.train()
    expected = original(**batch)
    got = model(**{key: value[mine] for key, value in batch.items()})
    expected.loss.backward()
    got.loss.backward()
    close(got.logits, expected.logits[mine], f"{name}: logits")
    loss = sum(smp.allgather(float(got.loss.detach()), smp.TP_GROUP)) / smp.tp_size()
    assert abs(loss - float(expected.loss.detach())) < 1e-5, (name, loss, float(expected.loss.detach()))
    # Gradients, brought to the original's names as if they were its weights.
    gradients = {record.name: record.parameter.grad for record in model.registry}
    with torch.no_grad():
        for record in model.registry:
            gradient = gradients[record.name]
            record.parameter.copy_(torch.zeros_like(record.parameter) if gradient is None else gradient)
    theirs = to_theirs(model.state_dict())
    for key, parameter in original.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        close(theirs[key], gradient, f"{name}: gradient of {key}")
    return said


def _all(names, overrides=None):
    return {name: _check(name, overrides) for name in names}


@pytest.mark.parametrize("name", MODELS)
def test_one_rank(solo, name):
    solo({"ddp": True})
    _check(name)


CASES = list(itertools.product((2, 4), ("speed", "memory"), (True, False)))
SAMPLE = {(2, "speed", True), (4, "memory", False)}


@pytest.mark.parametrize(
    ("degree", "optimize", "prescaled"),
    [pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.full) for case in CASES],
)
def test_answers_gradients_and_states_equal_the_original(ranks, degree, optimize, prescaled):
    names = MODELS if degree == 2 else [name for name in MODELS if name != "llama tied"]  # it has two key heads
    ranks(_all, degree, names, config=_config(degree, optimize, prescaled), timeout=100)


@pytest.mark.parametrize(("optimize", "prescaled"), [("memory", False), ("speed", True)])
def test_with_the_vocabulary_split(ranks, optimize, prescaled):
    names = ["gpt2", "gptj", "llama"]
    ranks(_all, 2, names, {"distribute_embedding": True}, config=_config(2, optimize, prescaled), timeout=100)


def test_positions_separate_documents_where_the_original_does() -> None:
    import transformers as hf

    from smp_runtime.module_conversion.huggingface import causal

    def separates(original: type, use_cache: bool | None, **more: bool) -> bool:
        facts = {"training": True, "is_gradient_checkpointing": False, **more}
        model = SimpleNamespace(config=hf.LlamaConfig(use_cache=True), original=original, **facts)
        return causal.CausalModel._separates(model, use_cache)

    assert separates(hf.LlamaForCausalLM, False)
    assert not separates(hf.LlamaForCausalLM, None)  # a cache that the original makes has no documents
    assert separates(hf.LlamaForCausalLM, None, is_gradient_checkpointing=True)
    assert not separates(hf.LlamaForCausalLM, None, is_gradient_checkpointing=True, training=False)
    assert not separates(torch.nn.Linear, False)
    mask = causal._document_mask(torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]))
    assert mask[0, 0].int().tolist() == [[1, 1, 0, 0, 0]] * 2 + [[0, 0, 1, 1, 1]] * 3
    assert bool(mask[1].all())
