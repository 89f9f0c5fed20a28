"""The notebook side with either version of the SDK, or with none: what still works, and what is said of the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from smp_estimator.sdk import installed

WITHOUT = """
import importlib.metadata as metadata, sys
known = metadata.version
def version(name):
    if name == "sagemaker":
        raise metadata.PackageNotFoundError(name)
    return known(name)
metadata.version = version
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("sagemaker", "boto3", "botocore"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["smp_estimator.SMPEstimator", "smp_estimator.ProcessSession"])
def test_names_of_version_2_without_any(name: str) -> None:
    said = python(f"import smp_estimator\ntry: {name}\nexcept ImportError as error: print(error)")
    assert "SMPEstimator, SMPHuggingFace and ProcessSession need version 2 of the SageMaker SDK" in said
    assert "no SageMaker SDK is installed" in said
    assert "pip install 'sagemaker<3," in said


def test_names_of_version_3_without_any() -> None:
    said = python(
        "import smp_estimator.model_trainer as t\ntry: t.ModelTrainer\nexcept ImportError as error: print(error)"
    )
    assert "need version 3 of the SageMaker SDK, and no SageMaker SDK is installed" in said


def test_the_dictionary_and_the_command_line_need_none(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text('from smp_estimator import SMPEstimator\nSMPEstimator(entry_point="a.py", source_dir="s").fit()\n')
    said = python(
        "from smp_estimator import MPI, ModelParallel\n"
        "print((ModelParallel(ddp=True) | MPI(processes_per_host=2)).keys())\n"
        "from click.testing import CliRunner\n"
        "from smp_estimator.cli.main import main\n"
        "def call(*words, **more):\n"
        "    done = CliRunner().invoke(main, list(words), **more)\n"
        "    print(done.exit_code, done.output)\n"
        "call('validate', '-', input='{\"ddp\": True}')\n"
        "call('plan', 'gpt2', '--instance-type', 'ml.p4d.24xlarge')\n"
        f"call('migrate', {str(job)!r})\n"
        "call('run', __import__('smp_estimator').__file__)\n"
        "call('doctor', '--mode', 'process')\n"
    )
    assert "smdistributed" in said
    assert "0 valid on 1 × ml.p4d.24xlarge" in said
    assert "+ModelTrainer(" in said
    assert "1 Error: SMPEstimator, SMPHuggingFace and ProcessSession need version 2" in said
    assert said.count("Traceback") == 0


def test_the_other_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "installed_version", lambda: "3.27.0")
    with pytest.raises(installed.SDKMissing, match=r"SDK 3\.27\.0 is installed .* use ModelTrainer and ModelParallel"):
        installed.require(2)
    installed.require(3)
    monkeypatch.setattr(installed, "installed_version", lambda: "4.0.0")
    with pytest.raises(installed.SDKMissing) as caught:
        installed.require(3)
    assert "with the SDK that is there" not in str(caught.value)
