"""Every language model of Transformers, in a tiny configuration, trains under every mode as in one process."""

from __future__ import annotations

from importlib import metadata

import pytest
from support.models.tiny_families import Family as Family
from support.models.tiny_families import NotBuilt, tiny_model, tiny_settings
from support.training.family_training import MODES, Distance, distance, note_alone

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


def _cases():
    """All that the file of outcomes says to be equal, with this version of Transformers."""
    for family in read_matrix().families:
        for mode, outcome in family.majors.get(MAJOR, {}).items():
            if outcome.is_equal:
                always = SAMPLE.get((family.kind, family.model_type)) == mode
                yield pytest.param(family.kind, family.model_type, mode, marks=[] if always else pytest.mark.full)


@pytest.mark.parametrize(("kind", "model_type", "mode"), list(_cases()))
def test_it_trains_as_in_one_process(ranks, tmp_path, kind, model_type, mode):
    family, file = Family(kind, model_type), tmp_path / "alone.pt"
    ranks(note_alone, 1, family, file, init=False)
    size, config = MODES[mode]
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
