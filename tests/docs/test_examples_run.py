"""What pages show is what happens: their examples are run, and the output that they print is compared."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.documents.doc_blocks import ROOT, blocks, commands
from support.platform.cloud import Cloud, service
from support.platform.command_line import call, flat
from support.platform.stock_images import fix_day

START = ROOT / "docs" / "start.md"
CHOOSE = ROOT / "docs" / "choose.md"
PLANNING = ROOT / "docs" / "planning.md"


def codes(document: Path, language: str) -> list[str]:
    return [block.code for block in blocks(document) if block.language == language]


def run(code: str, folder: Path) -> dict[str, object]:
    (folder / "block.py").write_text(code)
    return runpy.run_path(str(folder / "block.py"))


# -- planning ------------------------------------------------------------------------------------------------


def planner_commands(document: Path) -> list[tuple[list[str], str]]:
    """Commands of the planner, and the output that the page shows behind them."""
    found, of_page = [], blocks(document)
    for n, block in enumerate(of_page):
        if block.language == "sh":
            shown = of_page[n + 1].code if n + 1 < len(of_page) and of_page[n + 1].language == "" else ""
            for words in commands(block.code):
                if words[:2] in (["smp-estimator", "plan"], ["smp-estimator", "suggest"]):
                    found.append((words[1:], shown))
                    shown = ""
    return found


@pytest.mark.parametrize("document", [CHOOSE, PLANNING], ids=lambda path: path.name)
def test_the_planner_prints_what_the_pages_show(document: Path) -> None:
    tried = planner_commands(document)
    assert len(tried) >= 2
    assert any(shown for _, shown in tried)
    for words, shown in tried:
        needs_card = (
            "--rates" in words
        )  # which `smp-estimator calibrate` writes on a GPU: tests/rehearsal/test_calibration.py
        if (words[0] == "plan" and not needs_card) or shown:
            said = flat(call(*words))  # lines are broken elsewhere
            for line in shown.splitlines():
                assert line == "…" or " ".join(line.split()) in said, f"{shlex.join(words)} does not print: {line}"


@pytest.mark.full
def test_the_planner_in_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(codes(PLANNING, "python")[0], tmp_path)
    assert capsys.readouterr().out.count("verdict") >= 5


# -- estimators ----------------------------------------------------------------------------------------------


def test_the_first_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README, Start here and the estimator's page: accepted as they are written, with a script that is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(codes(START, "python")[0])
    (tmp_path / "entrypoints").symlink_to(ROOT / "entrypoints")
    for code in (
        next(code for code in codes(ROOT / "README.md", "python") if "SMPEstimator(" in code),
        codes(START, "python")[-1],
        *codes(ROOT / "docs/estimator.md", "python"),
    ):
        assert "SMPEstimator(" in code
        estimator = run(code.split("estimator.fit(")[0], tmp_path)["estimator"]
        estimator._check_code()  # what fit() refuses
        assert json.loads(estimator.hyperparameters()["mp_parameters"])["ddp"] is True


def test_the_cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(codes(START, "python")[0])
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    fix_day(monkeypatch)
    (code,) = codes(ROOT / "docs" / "cloud.md", "python")
    with service() as boto:
        cloud = Cloud(boto)
        monkeypatch.setattr("sagemaker.estimator.Session", lambda **_: cloud.session)
        # The log of a job that nobody runs would not end.
        run(code.replace('data"})', 'data"}, wait=False)'), tmp_path)
        request = cloud.requests[-1]
        assert request["ResourceConfig"]["InstanceCount"] == 2
        assert request["CheckpointConfig"]["S3Uri"] == "s3://my-bucket/checkpoints"
        parameters = cloud.carried()["mp_parameters"]
        assert parameters["tensor_parallel_degree"] == 8


# -- from an empty folder ------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.job
@pytest.mark.timeout(300)
def test_start_here(tmp_path: Path) -> None:
    """The page, in its order: scripts are written, commands run, and the exported model is read back."""
    train, finetune, read_back, notebook = codes(START, "python")
    (tmp_path / "train.py").write_text(train)
    (tmp_path / "finetune.py").write_text(finetune)
    said = ""
    for code in codes(START, "sh"):
        for words in commands(code):
            if words[0] in ("smp-estimator", "mkdir", "tar") and words[1:2] != ["doctor"]:
                words = (
                    [sys.executable, "-m", "smp_estimator.cli", *words[1:]] if words[0] == "smp-estimator" else words
                )
                done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
                assert done.returncode == 0, done.stdout + done.stderr
                said += done.stdout
    shown = next(block.code for block in blocks(START) if block.language == "" and "Partition" in block.code)
    for line in shown.splitlines():
        assert line == "…" or line in said or re.match(r"epoch 4: loss 0\.\d", line)
    losses = [float(text) for text in re.findall(r"^epoch \d: loss (\d\.\d+)", said, re.MULTILINE)]
    assert losses[-1] < losses[0] / 2
    assert (tmp_path / "model.pt").is_file()
    (tmp_path / "read_back.py").write_text(read_back)
    done = subprocess.run([sys.executable, "read_back.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "parameters" in done.stdout, done.stderr
    (tmp_path / "notebook.py").write_text(notebook)
    done = subprocess.run([sys.executable, "notebook.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
