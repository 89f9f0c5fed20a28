"""The command line where version 3 of the SDK is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from support.platform.sdk3 import require_sdk_3

require_sdk_3()

from smp_estimator.cli.main import main  # noqa: E402 - only where it is installed

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["run", *words])
    return done.exit_code, done.output


def test_run(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "beside.py").write_text("")
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "assert os.listdir('.') == ['train.py'] and os.path.isdir(os.environ['SM_CHANNEL_TRAIN'])\n"
        "print('rank', os.environ['SMP_RANK'], os.environ['A'], sys.argv[-4:], flush=True)\n"
    )
    code, said = run(
        str(script),
        "--processes",
        "2",
        "--channel",
        f"train={tmp_path / 'data'}",
        "--env",
        "A=b",
        "--hyperparameter",
        "steps=3",
        "--output",
        str(tmp_path / "out"),
        "--checkpoints",
        str(tmp_path / "kept"),
        "--",
        "--lr",
        "0.1",
    )
    assert code == 0, said
    for rank in range(2):
        assert f"rank {rank} b ['--steps', '3', '--lr', '0.1']" in said
    assert said.count(f"file://{tmp_path / 'out'}/model.tar.gz") == 1, "said once: Model: …"
    assert (tmp_path / "kept").is_dir()


def test_a_refusal_has_the_code_that_it_has_with_version_2(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    parameters = '{"tensor_parallel_degree": 2, "ddp": true}'
    code, said = run(str(tmp_path / "train.py"), "--processes", "3", "--parameters", parameters)
    assert code == 1
    assert "[SMP102]" in said
    code, said = run(str(tmp_path / "train.py"), "--parameters", '{"microbatche": 2}')
    assert "[SMP101]" in said


def test_run_of_a_script_that_fails(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('on purpose')\n")
    code, said = run(str(tmp_path / "train.py"), "--source-dir", str(tmp_path))
    assert code == 1
    assert "rank 0 (algo-1): ValueError: on purpose" in said


def test_doctor() -> None:
    said = " ".join(CliRunner().invoke(main, ["doctor", "--mode", "process"]).output.split())
    assert "3." in said
    assert "sagemaker" in said
