"""A script whose data are elsewhere is rehearsed with batches of given shapes; epochs are counted in steps."""

import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from smp_config import ConfigError
from smp_estimator.rehearsal import rehearse
from smp_estimator.rehearsal.rehearse import steps_of_epochs
from smp_records.rehearsal import input_shapes
from smp_tools.rehearsal.data import Loaders
from tests.rehearsal.test_command import kind, rehearsed

SCRIPT = Path(__file__).with_name("loader_script.py")
SHAPES = {"image": "-1,3,32,32", "label": "-1:int64"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"x": "8,abc"}, "the input shape 'x' is '8,abc'; sizes are whole numbers"),
        ({"x": "0,4"}, "sizes are whole numbers from 1"),
        ({"x": ""}, "the input shape 'x' is ''"),
        ({"x": "8:int7"}, "has the type 'int7'; it is one of float32"),
        ({"0": "8", "x": "8"}, "names and numbers: 0, x"),
    ],
)
def test_shapes_that_cannot_be_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        input_shapes(given)


def following(given, samples=100):
    return Loaders(input_shapes(given), samples)


@pytest.fixture
def follow():
    """Loaders that are followed to the end of the test."""
    started = []

    def start(given, samples=100):
        found = following(given, samples)
        found.start()
        started.append(found)
        return found

    yield start
    for one in started:
        one.stop()


def test_batches_have_names_and_the_loader_s_size():
    batch = following(SHAPES).batch(6)
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items()} == {
        "image": ((6, 3, 32, 32), torch.float32),
        "label": ((6,), torch.int64),
    }
    assert batch["image"].min() == 1
    assert batch["label"].max() == 0


def test_numbered_shapes_make_a_list_in_their_order():
    first, second = following({"1": "2:bool", "0": "2,5:bfloat16"}).batch(9)
    assert (tuple(first.shape), first.dtype, second.dtype) == ((2, 5), torch.bfloat16, torch.bool)


def test_a_data_set_without_its_files_has_as_many_samples_as_were_said(follow):
    loaders = follow({"x": "-1,2"}, 10)

    class Missing(Dataset):
        def __init__(self):
            self.size = Path("/nowhere/at/all").stat().st_size

        def __len__(self):
            return self.size

    class Empty(Dataset):
        def __len__(self):
            return 0

    loader = DataLoader(Missing(), batch_size=4)
    assert [tuple(batch["x"].shape) for batch in loader] == [(4, 2)] * 3
    assert (loaders.batches, loaders.epoch_batches) == (3, 3)
    assert len(DataLoader(Empty(), batch_size=5, shuffle=True)) == 2


def test_errors_of_data_sets_are_told_where_nothing_stands_for_their_files(follow):
    loaders = follow({})

    class Missing(Dataset):
        def __init__(self):
            Path("/nowhere/at/all").read_bytes()

    with pytest.raises(FileNotFoundError):
        Missing()
    assert [batch.tolist() for batch in DataLoader(list(range(4)), batch_size=2)] == [[0, 1], [2, 3]]
    assert loaders.batches == 2
    loaders.stop()
    list(DataLoader(list(range(4))))
    assert loaders.batches == 2


def reported(**given):
    return rehearsed(kind(0, 1, **given)).rehearsal


def test_epochs_are_whole_steps_of_the_samples_or_of_the_loader():
    found = reported(step_samples=256, step_batches=2, epoch_batches=1001)
    assert steps_of_epochs(found, 3, 1_000_000) == 3 * 3906
    assert steps_of_epochs(found, 2, None) == 1000
    assert steps_of_epochs(found, 0.5, None) == 250


@pytest.mark.parametrize(
    ("given", "samples", "said"),
    [
        ({}, None, "nothing says how long one is"),
        ({}, 1000, "nothing says how many a step trains on"),
        ({"step_samples": 256}, 255, "255 samples are fewer than the 256 of a step"),
        ({"step_batches": 8, "epoch_batches": 7}, None, "has 7 batches, fewer than the 8 of a step"),
    ],
)
def test_an_epoch_of_unknown_or_no_length_is_refused(given, samples, said):
    with pytest.raises(ConfigError, match=said):
        steps_of_epochs(reported(**given), 1, samples)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"epochs": 2, "steps": 3}, "give one of the two"),
        ({"epochs": 0}, "epochs is 0; it counts passes"),
        ({"epochs": 1, "samples": 0}, "samples is 0"),
        ({"input_shapes": {"x": "a"}}, "the input shape 'x'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(given, said):
    with pytest.raises(ConfigError, match=said):
        rehearse(SCRIPT, **given)


@pytest.mark.full
@pytest.mark.job
@pytest.mark.timeout(120)
def test_a_script_whose_data_are_elsewhere_is_rehearsed_as_it_is(tmp_path):
    found = rehearse(
        SCRIPT,
        instance_count=2,
        parameters={"ddp": True},
        channels={"train": tmp_path / "only" / "there"},
        input_shapes=SHAPES,
        epochs=10,
        samples=6400,
        other_ranks=False,
    )
    (only,) = found.rehearsal.kinds
    # 16 ranks with batches of 4; each reads 400 samples of an epoch.
    assert (only.step_samples, only.step_batches, only.epoch_batches) == (64, 1, 100)
    assert found.training_steps == 1000
    assert found.training_hours == pytest.approx(1000 * found.rehearsal.step_seconds / 3600)
    assert "1,000 steps (10 epochs) take" in str(found)
    assert os.path.basename(only.peak_line).startswith("loader_script.py:")
