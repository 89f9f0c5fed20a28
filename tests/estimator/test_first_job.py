"""``smp-estimator init``: what it asks, what it writes, and that what it writes trains."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.platform.command_line import call, flat

from smp_estimator.first_job.answers import MODELS, STRATEGIES, Answers
from smp_estimator.first_job.notebook import notebook
from smp_estimator.first_job.script import script

ALL = [Answers(*each) for each in itertools.product(MODELS, STRATEGIES, [2], ["local"], [True, False])]
LOCAL = [answers for answers in ALL if answers.checkpoints]


def _id(answers: Answers) -> str:
    return f"{answers.model}-{answers.strategy}-{'kept' if answers.checkpoints else 'not-kept'}"


def call_of(answers: Answers) -> str:
    """The cell with the estimator."""
    cells = json.loads(notebook(answers))["cells"]
    return next(text for cell in cells if "SMPEstimator(" in (text := "".join(cell["source"])))


@pytest.mark.parametrize("answers", ALL, ids=_id)
def test_what_is_written_can_be_read(answers: Answers) -> None:
    text = script(answers)
    compile(text, "train.py", "exec")
    assert "{" not in re.sub(r"f\".*?\"|'\{.*\}'", "", text), "nothing is left to fill in"
    assert ("smp.auto_resume" in text) == answers.checkpoints
    assert ("set_tensor_parallelism" in text) == (answers.strategy == "tensor")
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.reads(notebook(answers), as_version=4))


@pytest.mark.parametrize("answers", LOCAL, ids=_id)
def test_the_estimator_accepts_it(answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(script(answers))
    names: dict[str, object] = {}
    exec(call_of(answers), names)
    parameters = json.loads(names["estimator"].hyperparameters()["mp_parameters"])
    assert answers.parameters.items() <= parameters.items()


def test_a_cloud_notebook() -> None:
    text = call_of(Answers(strategy="tensor", processes=8, instance_type="ml.p4d.24xlarge"))
    compile(text, "cell", "exec")
    assert 'instance_type="ml.p4d.24xlarge"' in text
    assert "role=get_execution_role()" in text
    assert "s3://BUCKET/checkpoints" in text


# -- the command -----------------------------------------------------------------------------------------------


def test_five_questions(tmp_path: Path) -> None:
    said = call("init", str(tmp_path / "new"), input="transformers\npipeline\nlocal\n4\nn\n").output
    assert said.count("?") == 5
    text = (tmp_path / "new" / "train.py").read_text()
    assert text == script(Answers("transformers", "pipeline", 4, "local", False))
    assert (tmp_path / "new" / "train.ipynb").read_text() == notebook(
        Answers("transformers", "pipeline", 4, "local", False)
    )
    assert '{"ddp": true, "pipeline_parallel_degree": 4, "microbatches": 8}' in said


def test_options_are_not_asked_for(tmp_path: Path) -> None:
    said = call("init", str(tmp_path), "--strategy", "tensor", "--processes", "2", "--yes").output
    assert "?" not in said
    assert (tmp_path / "train.py").read_text() == script(Answers(strategy="tensor"))
    asked = call("init", str(tmp_path / "b"), "--model", "own", "--strategy", "data", input="\n\n\n").output
    assert asked.count("?") == 3


def test_nothing_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine")
    said = flat(call("init", str(tmp_path), "--yes", code=1))
    assert f"{tmp_path} has train.py already" in said
    assert (tmp_path / "train.py").read_text() == "mine"
    assert not (tmp_path / "train.ipynb").exists()
    call("init", str(tmp_path), "--yes", "--force")
    assert (tmp_path / "train.py").read_text() == script(Answers())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--processes", "16", "--instance-type", "ml.p4d.24xlarge"], "has 8 GPUs, one for each: use --processes 8"),
        (["--processes", "1", "--strategy", "pipeline"], "the strategy pipeline divides a model over ranks"),
    ],
)
def test_what_no_job_can_be(options: list[str], said: str, tmp_path: Path) -> None:
    assert said in flat(call("init", str(tmp_path), "--yes", *options, code=1))
    assert not list(tmp_path.iterdir())


# -- as a job --------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.job
@pytest.mark.parametrize("answers", LOCAL, ids=_id)
def test_it_trains(answers: Answers, tmp_path: Path) -> None:
    """By the command that it prints; stopped by nobody, and a second time there is nothing left to do."""
    (tmp_path / "train.py").write_text(script(answers))
    words = shlex.split(answers.command.replace("\\\n", ""))
    for turn in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "smp_estimator.cli", *words[1:]],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        losses = [float(loss) for loss in re.findall(r"^epoch \d: loss (\S+)", done.stdout, re.MULTILINE)]
        if turn == 0:
            assert len(losses) == 3
            assert losses[-1] < losses[0]
    assert (tmp_path / "output" / "model.tar.gz").is_file()
