"""Models of Transformers, in tiny configurations, train under every mode as in one process."""

from __future__ import annotations

from importlib import metadata

import pytest
from support.models.tiny_families import Family as Family
from support.models.tiny_families import NotBuilt, tiny_model, tiny_settings
from support.training.family_training import MODES, SHARDED, STAGES, TENSOR, Distance, distance, note_alone

from smp_estimator.models.outcomes import read_matrix

MAJOR = metadata.version("transformers").partition(".")[0]
#: Always run: different kinds of models, under one mode each.
SAMPLE = {
    ("causal", "gpt2"): "tp 2",
    ("causal", "mixtral"): "sdp 2",
    ("causal", "mamba"): "pp 2",
    ("masked", "bert"): "tp 2 × pp 2",
    ("masked", "deberta-v2"): "sdp 2",
    ("seq2seq", "bart"): "tp 2",
    ("seq2seq", "t5"): "pp 2",
}

_DEGREE = {"ddp": True, "context_parallel_degree": 2}
#: Ranks that share sequences out, beside other strategies.
CONTEXT = {
    "cp 2": (2, _DEGREE),
    "cp 4": (4, {"ddp": True, "context_parallel_degree": 4}),
    "cp 2 × tp 2": (4, {**TENSOR, **_DEGREE, "prescaled_batch": True}),
    "cp 2 × pp 2": (4, {**STAGES, **_DEGREE}),
    "cp 2 × sdp 4": (4, {**SHARDED, **_DEGREE, "sharded_data_parallel_degree": 4}),
}
#: Of these a sample of kinds: causal, windows, soft caps, mixtures, states, both directions, two sequences.
SHARED_OUT = {
    "causal": ("gpt2", "llama", "mistral", "gemma2", "mixtral", "deepseek_v3", "bloom", "mamba"),
    "masked": ("bert", "deberta-v2"),
    "seq2seq": ("t5", "bart"),
}
#: Always run. Beside other strategies a model of our own does in ``tests/context/test_training.py``.
SAMPLE_SHARED_OUT = {
    ("causal", "gpt2"): "cp 4",
    ("causal", "mixtral"): "cp 2",
    ("seq2seq", "t5"): "cp 2",
    ("masked", "bert"): "cp 2 × pp 2",
}


def _cases():
    """All that the file of outcomes says to be equal, with this version of Transformers; then the sample of shared sequences."""
    for family in read_matrix().families:
        for mode, outcome in family.majors.get(MAJOR, {}).items():
            if outcome.is_equal:
                yield family.kind, family.model_type, mode, SAMPLE
    for kind, names in SHARED_OUT.items():
        for name in names:
            yield from ((kind, name, mode, SAMPLE_SHARED_OUT) for mode in CONTEXT)


@pytest.fixture(scope="module")
def alone(_shared_pool, tmp_path_factory):
    """``alone(family)``: the file with what one process trains, which is trained once for all modes."""
    folder, known = tmp_path_factory.mktemp("alone"), {}

    def file_of(family):
        if family not in known:
            file = folder / f"{len(known)}.pt"
            _shared_pool.run(note_alone, 1, family, file, init=False)
            known[family] = file
        return known[family]

    return file_of


@pytest.mark.parametrize(
    ("kind", "model_type", "mode"),
    [
        pytest.param(kind, name, mode, marks=[] if sample.get((kind, name)) == mode else pytest.mark.full)
        for kind, name, mode, sample in _cases()
    ],
)
def test_it_trains_as_in_one_process(ranks, alone, kind, model_type, mode):
    family = Family(kind, model_type)
    file = alone(family)
    size, config = (MODES | CONTEXT)[mode]
    for found in ranks(distance, size, family, file, config=config):
        assert found.is_equal, found


def test_the_sample_is_of_families_that_are_equal():
    known = {(family.kind, family.model_type): family.majors for family in read_matrix().families}
    for family, mode in SAMPLE.items():
        assert known[family]["4"][mode].is_equal, family


def test_a_distance_is_none_only_within_the_bounds():
    assert Distance(1e-6, 1e-5, "").is_equal
    assert not Distance(1e-4, 0.0, "").is_equal
    assert not Distance(0.0, 1e-3, "weight").is_equal


def test_sizes_are_shrunk_together():
    settings = tiny_settings(Family("causal", "llama"))
    assert (settings["hidden_size"], settings["num_attention_heads"], settings["num_key_value_heads"]) == (32, 4, 4)
    assert (settings["vocab_size"], settings["num_hidden_layers"], settings["intermediate_size"]) == (64, 2, 88)
    model = tiny_model(Family("causal", "mixtral"))
    assert model.config.num_local_experts == 4
    assert sum(p.numel() for p in model.parameters()) < 100_000


def test_what_a_default_configuration_lacks_is_found_by_the_error():
    assert tiny_settings(Family("masked", "esm"))["vocab_size"] == 64


@pytest.mark.full
def test_what_does_not_train_in_one_process_gives_its_reason():
    with pytest.raises(NotBuilt, match="wav2vec2|input_ids"):
        tiny_settings(Family("masked", "wav2vec2"))
