"""Two thousand damaged checkpoints before the commands that need no job, and weights of Transformers before both."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support.faults.damaged_checkpoints import damage, damage_safetensors
from support.faults.small_checkpoints import SmallModel, bounded

import smdistributed.modelparallel.torch as smp
from smp_estimator.cli.main import main
from smp_runtime.errors import SMPError
from smp_runtime.job import session

WEIGHTS = "model.safetensors"


@pytest.fixture
def small(tmp_path):
    logging.getLogger("smp").setLevel(logging.ERROR)  # thousands of warnings
    session.init({})
    try:
        made = SmallModel(tmp_path / "good")
        folder = tmp_path / "good" / "weights"
        folder.mkdir()
        state = {name: value.contiguous() for name, value in made.model.module.state_dict().items()}
        for number, (name, value) in enumerate(state.items()):
            save_file({name: value}, folder / f"model-{number}.safetensors", metadata={"format": "pt"})
        index = {
            "metadata": {},
            "weight_map": {name: f"model-{number}.safetensors" for number, name in enumerate(state)},
        }
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
        yield made
    finally:
        session.shutdown()
        logging.getLogger("smp").setLevel(logging.INFO)


def _command(*words):
    """Exit code and output of ``smp-estimator checkpoint …``; another exception than its own end is raised."""
    with bounded():
        done = CliRunner().invoke(main, ["checkpoint", *map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    # Nothing that a file holds moves a terminal's cursor, or is an instruction to it.
    if "Traceback" in done.output or any(ord(each) < 32 and each not in "\n\t" for each in done.output):
        raise AssertionError(done.output)
    return done.exit_code, done.output


def _numbers(file):
    return {float(value) for tensor in load_file(file).values() for value in tensor.reshape(-1)}


def _partial(where, outside, seed):
    """What the commands say of a damaged partial checkpoint; the damage, and whether it was found."""
    done = damage(where / "2_partial", outside, seed)
    before = sorted(p.name for p in outside.iterdir())
    code, said = _command("verify", where, *(() if seed % 2 else ("--tag", "2")))
    _command("inspect", where, "--json", "--tensors")
    _command("inspect", where)
    out = where.parent / "out.safetensors"
    converted, words = _command("convert", where, out, "--to", ("safetensors", "full")[seed % 3 == 2], "--tag", "2")
    if converted == 0 and seed % 3 != 2 and not done.is_forged:
        # What is wrong with other files than those of the weights is none of its business.
        assert _numbers(out) == {2.0}, f"{done.what}: {words}"
    if code == 0 and not done.is_forged:
        assert converted == 0, f"{done.what}: {said} but {words}"
    return done.what, before, code != 0


def _weights(small, where, outside, seed):
    """The same of damaged weights of Transformers, which a job loads too."""
    done = damage_safetensors(where / "weights", outside, seed)
    before = sorted(p.name for p in outside.iterdir())
    code, _ = _command("convert", where / "weights", where.parent / "out.safetensors", "--to", "safetensors")
    small.fill(0)
    try:
        with bounded():
            smp.resume_from_checkpoint(str(where / "weights"), tag=WEIGHTS, partial=False, load_optimizer=False)
    except SMPError as error:
        assert len(str(error)) > 40, f"{done.what}: {error}"
        assert {float(x) for p in small.model.module.parameters() for x in p.detach().reshape(-1)} == {0.0}, done.what
        return done.what, before, True
    return done.what, before, code != 0


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=[pytest.mark.full, pytest.mark.timeout(1500)])])
def test_damaged_checkpoints_before_the_commands(small, tmp_path, count):
    found = Counter()
    for seed in range(count):
        where, outside = tmp_path / "damaged", tmp_path / "outside"
        for folder in (where, outside):
            shutil.rmtree(folder, ignore_errors=True)
        for file in tmp_path.glob("out*"):
            file.unlink()
        shutil.copytree(tmp_path / "good", where, ignore=shutil.ignore_patterns(".smp-saving"))
        outside.mkdir()
        kind = "weights" if seed % 2 else "partial"
        try:
            what, before, is_noticed = (
                _weights(small, where, outside, seed) if seed % 2 else _partial(where, outside, seed)
            )
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {kind}: {type(error).__name__}: {error}") from error
        assert sorted(p.name for p in outside.iterdir()) == before, f"seed {seed}, {what}"
        found[kind, is_noticed] += 1
    print(dict(found))
    for kind in ("weights", "partial"):
        # What the damage is to is needed, or is read by nobody, or still is what the format allows.
        assert 0.3 < found[kind, True] / (found[kind, True] + found[kind, False]) < 0.99


def test_the_weights_are_read_where_they_are_whole(small, tmp_path):
    small.fill(0)
    smp.resume_from_checkpoint(str(tmp_path / "good" / "weights"), tag=WEIGHTS, partial=False, load_optimizer=False)
    assert {float(x) for p in small.model.module.parameters() for x in p.detach().reshape(-1)} == {2.0}
    code, said = _command("convert", tmp_path / "good" / "weights", tmp_path / "out.safetensors", "--to", "safetensors")
    assert code == 0, said
    assert _numbers(tmp_path / "out.safetensors") == {2.0}
