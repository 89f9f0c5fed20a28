"""Names, positions and comments of ``migrate`` where a script is written unusually."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from smp_estimator.migration import migrate_sources
from smp_estimator.migration.source import MARK

CALL = 'PyTorch(entry_point="t.py", source_dir="s", role="r", instance_type="ml.g5.xlarge", instance_count=1, image_uri="i"'


def migrated(*texts: str) -> tuple[str, list[str]]:
    """All changed pieces as one script, and the notes."""
    after, notes = migrate_sources(list(texts), Path())
    code = "\n".join(after)
    ast.parse(code)
    return code, [note.text for each in notes for note in each]


def test_imports_in_functions_and_blocks() -> None:
    code, _ = migrated(
        f"def a():\n    from sagemaker.pytorch import PyTorch\n    return {CALL})\n\n"
        f"def b():\n    from sagemaker.pytorch import PyTorch\n    x = {CALL})\n    x.fit()\n\n"
        "try:\n    from sagemaker.pytorch import PyTorch\nexcept ImportError:\n    raise\na().fit()\n"
    )
    assert code.splitlines()[1] == "from smp_estimator.model_trainer import ModelTrainer", "above both functions"
    assert "try:\n    pass\n" in code
    assert "x.train()" in code
    assert "a().train()" in code


def test_imports_that_share_a_line() -> None:
    code, _ = migrated(f"import os; import sagemaker; import re\nfrom sagemaker.pytorch import PyTorch\nx = {CALL})\n")
    assert "import os; import re\n" in code


def test_an_import_stands_above_its_first_use() -> None:
    code, _ = migrated(
        "import sagemaker\nprint(sagemaker.tuner)\n",
        f"role = sagemaker.get_execution_role()\nfrom sagemaker.pytorch import PyTorch\nx = {CALL})\n",
    )
    assert code.index("import get_execution_role") < code.index("role = get_execution_role()")
    assert "import sagemaker\n" in code


@pytest.mark.parametrize("use", ["print(sagemaker)", "print(sagemaker.__version__)", "help(f'{sagemaker}')"])
def test_the_import_of_a_name_that_stays(use: str) -> None:
    code, _ = migrated(f"import sagemaker\nfrom sagemaker.pytorch import PyTorch\nx = {CALL})\n{use}\n")
    assert "\nimport sagemaker\n" in code


def test_names_in_f_strings_of_several_lines() -> None:
    code, notes = migrated(
        f"import sagemaker\nfrom sagemaker.pytorch import PyTorch\nx = {CALL})\n"
        'print(f"""é {sagemaker.Session().default_bucket()} {{}}\n {x.latest_training_job.name!r:>{9}} {x.jobs}"""\n'
        '      f" {x.latest_training_job.name}")\n'
    )
    assert 'f"""é {Session().default_bucket()} {{}}\n {x.latest_training_job.training_job_name!r:>{9}}' in code
    assert 'f" {x.latest_training_job.training_job_name}"' in code
    assert len(notes) == 1


def test_two_classes_of_one_name() -> None:
    code, _ = migrated(
        "from smp_estimator import MPI, ModelParallel, SMPEstimator\n"
        "x = SMPEstimator(entry_point='t.py', source_dir='s', distribution=ModelParallel(ddp=True) | MPI(8))\n"
    )
    assert "distributed=model_trainer.ModelParallel.from_distribution(ModelParallel(ddp=True) | MPI(8))" in code
    assert "from smp_estimator import model_trainer" in code
    _, notes = migrated("from boto3 import Session\nimport sagemaker\ns = sagemaker.Session(Session())\n")
    assert len(notes) == 1
    assert "Session is boto3.Session here" in notes[0]


def test_uses_of_a_call_that_stays() -> None:
    text = (
        f"import sagemaker.pytorch\ngiven = {{}}\nx = sagemaker.pytorch.{CALL}, **given)\nx.fit('s3://b')\nx.deploy()\n"
    )
    code, _ = migrated(text)
    kept = [line for line in code.splitlines() if not line.startswith("#")]
    assert kept == text.splitlines()


def test_arguments_of_fit_that_only_a_run_knows() -> None:
    code, notes = migrated(f"from sagemaker.pytorch import PyTorch\nx = {CALL})\ngiven = {{}}\nx.fit(**given)\n")
    assert "x.fit(**given)" in code
    assert "write out what given holds" in notes[0]


def test_an_instance_type_that_may_be_local() -> None:
    call = CALL.replace('"ml.g5.xlarge"', "kind")
    _, notes = migrated(
        f"from sagemaker.pytorch import PyTorch\nkind = 'local' if a else 'ml.g5.xlarge'\nx = {call})\n"
    )
    assert any("training_mode=Mode.LOCAL_CONTAINER" in note for note in notes)
    code, _ = migrated(f"from sagemaker.pytorch import PyTorch\nkind = 'local_gpu'\nx = {call})\n")
    assert "training_mode=Mode.LOCAL_CONTAINER" in code


def test_a_distribution_that_only_a_run_knows() -> None:
    code, notes = migrated(f"from sagemaker.pytorch import PyTorch\nx = {CALL}, distribution=pick())\n")
    assert "ModelParallel.from_distribution(pick())" in code
    assert "only a run knows what pick() is" in notes[0]


def test_where_a_comment_stands() -> None:
    code, _ = migrated(
        f"from sagemaker.pytorch import PyTorch\nx = {CALL})\nif x:\n    y = 1; x.deploy()\nelse: x.register()\n"
    )
    lines = code.splitlines()
    assert lines[lines.index("    y = 1; x.deploy()") - 2].startswith(f"    {MARK} x.deploy")
    assert lines[lines.index("if x:") - 1].startswith("#")
    again, _ = migrated(code)
    assert again == code


def test_lines_of_the_kernel() -> None:
    text = "!pip install -q \\\n    'sagemaker<3' \\\n    boto3\nif x:\n    !ls\na, b = !ls\nc = (1\n  + 2)\n?print\nprint??\n"
    after, notes = migrate_sources([text, "x = ('%d'\n     % 3)\n"], Path())
    assert [line for line in after[0].splitlines() if not line.startswith("#")] == text.splitlines()
    assert after[0].startswith(MARK)
    assert len(notes[0]) == 1
    assert not notes[1]


@pytest.mark.parametrize("launcher", ["mpi", "torch_distributed"])
def test_the_launcher_says_whose_a_parameter_of_both_versions_is(launcher: str) -> None:
    parameters = '{"enabled": True, "parameters": {"context_parallel_degree": 2, "ddp": True}}'
    distribution = f'{{"smdistributed": {{"modelparallel": {parameters}}}, "{launcher}": {{"enabled": True}}}}'
    code, _ = migrated(f"from sagemaker.pytorch import PyTorch\nx = {CALL}, distribution={distribution})\n")
    assert ("SMP(context_parallel_degree=2" in code) == (launcher == "torch_distributed")
    assert '"context_parallel_degree": 2' in code or launcher == "torch_distributed"
