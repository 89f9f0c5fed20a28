"""Models of Transformers whose sequences ranks share out train as in one process: a sample of families, beside other strategies."""

from __future__ import annotations

import itertools

import pytest
from support.models.tiny_families import Family
from support.training.family_training import SHARDED, STAGES, TENSOR, distance, note_alone

DEGREE = {"ddp": True, "context_parallel_degree": 2}
MODES = {
    "cp 2": (2, DEGREE),
    "cp 4": (4, {"ddp": True, "context_parallel_degree": 4}),
    "cp 2 × tp 2": (4, {**TENSOR, **DEGREE, "prescaled_batch": True}),
    "cp 2 × pp 2": (4, {**STAGES, **DEGREE}),
    "cp 2 × sdp 4": (4, {**SHARDED, **DEGREE, "sharded_data_parallel_degree": 4}),
}
#: Kinds of attention and mixers of tokens: causal, windows, soft caps, mixtures, states, both directions, two sequences.
FAMILIES = (
    *(
        Family("causal", name)
        for name in ("gpt2", "llama", "mistral", "gemma2", "mixtral", "deepseek_v3", "bloom", "mamba")
    ),
    *(Family("masked", name) for name in ("bert", "deberta-v2")),
    *(Family("seq2seq", name) for name in ("t5", "bart")),
)
#: Always run. Beside other strategies a model of our own does in ``test_training.py``.
ALWAYS = {("gpt2", "cp 4"), ("mixtral", "cp 2"), ("t5", "cp 2"), ("bert", "cp 2 × pp 2")}


def _cases():
    for family, mode in itertools.product(FAMILIES, MODES):
        always = (family.model_type, mode) in ALWAYS
        yield pytest.param(family, mode, marks=[] if always else pytest.mark.full, id=f"{family.model_type}-{mode}")


@pytest.mark.parametrize(("family", "mode"), _cases())
def test_it_trains_as_in_one_process(ranks, tmp_path, family, mode):
    file = tmp_path / "alone.pt"
    ranks(note_alone, 1, family, file, init=False)
    size, config = MODES[mode]
    for found in ranks(distance, size, family, file, config=config):
        assert found.is_equal, found
