"""``smp-estimator migrate``: calls of SDK v2 become calls of SDK v3, and the rest of a script stays as it was written."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from smp_config import ConfigError
from smp_estimator.cli.main import main
from smp_estimator.migration import migrate_sources
from smp_estimator.migration.source import MARK

REPOSITORY = Path(__file__).parents[2]

MODEL_PARALLEL = (
    '{"smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 2}}}, '
    '"mpi": {"enabled": True, "processes_per_host": 8, "custom_mpi_options": "-x A=1"}}'
)
CLOUD = 'entry_point="train.py", source_dir="src", instance_type="ml.p4d.24xlarge", instance_count=2, role="r"'


def migrated(text: str, folder: Path = Path(".")) -> str:
    (after,), _ = migrate_sources([text], folder)
    ast.parse(after)
    return after


def notes(text: str, folder: Path = Path(".")) -> list[str]:
    _, (found,) = migrate_sources([text], folder)
    return [note.text for note in found]


def estimator(arguments: str, kind: str = "SMPEstimator", module: str = "smp_estimator") -> str:
    return f"from {module} import {kind}\njob = {kind}({arguments})\n"


def made(text: str) -> dict[str, Any]:
    """Arguments of the ModelTrainer in a script, as they are written."""
    (node,) = [
        n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "ModelTrainer"
    ]
    return {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg}


def test_a_call_of_each_class() -> None:
    for kind, module in (
        ("SMPEstimator", "smp_estimator"),
        ("SMPHuggingFace", "smp_estimator"),
        ("PyTorch", "sagemaker.pytorch"),
        ("PyTorch", "sagemaker.pytorch.estimator"),
        ("HuggingFace", "sagemaker.huggingface"),
    ):
        after = migrated(estimator(f"{CLOUD}, image_uri='i:1', distribution={MODEL_PARALLEL}", kind, module))
        assert kind not in after.replace("SMPHuggingFace", "")
        assert made(after) == {
            "source_code": "SourceCode(source_dir='src', entry_script='train.py')",
            "compute": "Compute(instance_type='ml.p4d.24xlarge', instance_count=2)",
            "stopping_condition": "StoppingCondition(max_runtime_in_seconds=86400)",
            "distributed": "ModelParallel(parameters={'partitions': 2}, processes_per_host=8, custom_mpi_options='-x A=1')",
            "training_image": "'i:1'",
            "role": "'r'",
        }


def test_names_that_are_imported_otherwise() -> None:
    after = migrated(f"import smp_estimator as se\nx = se.SMPEstimator({CLOUD})\nx.fit()\n")
    assert "x = ModelTrainer(" in after
    assert "x.train()" in after
    after = migrated(f"import sagemaker\nfrom sagemaker.pytorch import PyTorch as P\nx = P({CLOUD}, image_uri='i')\n")
    assert "x = ModelTrainer(" in after
    assert "import sagemaker\n" not in after
    assert "PyTorch" not in after


def test_every_record() -> None:
    after = migrated(
        estimator(
            f"{CLOUD}, volume_size=100, use_spot_instances=True, max_run=10, max_wait=20, output_path='s3://o', "
            "output_kms_key='k', disable_output_compression=True, checkpoint_s3_uri='s3://c', "
            "checkpoint_local_path='/opt/ml/checkpoints', subnets=['s'], security_group_ids=['g'], "
            "encrypt_inter_container_traffic=True, tags=[{'Key': 'a', 'Value': 'b'}], "
            "metric_definitions=[{'Name': 'n', 'Regex': 'r'}], environment={'A': '1'}, base_job_name='b', input_mode='FastFile'"
        )
    )
    found = made(after)
    assert found["compute"].endswith("volume_size_in_gb=100, enable_managed_spot_training=True)")
    assert found["stopping_condition"] == "StoppingCondition(max_runtime_in_seconds=10, max_wait_time_in_seconds=20)"
    assert found["output_data_config"] == (
        "OutputDataConfig(s3_output_path='s3://o', kms_key_id='k', compression_type='NONE')"
    )
    assert found["checkpoint_config"] == "CheckpointConfig(s3_uri='s3://c', local_path='/opt/ml/checkpoints')"
    assert found["networking"] == (
        "Networking(subnets=['s'], security_group_ids=['g'], enable_inter_container_traffic_encryption=True)"
    )
    assert found["tags"] == "[Tag(key='a', value='b')]"
    assert found["training_input_mode"] == "'FastFile'"
    assert ".with_metric_definitions(" in after
    names = {alias.name for n in ast.parse(after).body if isinstance(n, ast.ImportFrom) for alias in n.names}
    used = {n.id for n in ast.walk(ast.parse(after)) if isinstance(n, ast.Name)}
    assert names <= used, "nothing is imported that is not used"
    assert {"Compute", "Networking", "Tag", "MetricDefinition"} <= names


@pytest.mark.parametrize(
    ("distribution", "expected"),
    [
        ("None", None),
        ("{}", None),
        ("{'torch_distributed': {'enabled': True}}", "Torchrun()"),
        ("{'mpi': {'enabled': True, 'processes_per_host': 4}}", "MPI(process_count_per_node=4)"),
        ("{'smdistributed': {'dataparallel': {'enabled': True}}}", "Torchrun()"),
        ("settings", "ModelParallel.from_distribution(settings)"),
        ("make(2)", "ModelParallel.from_distribution(make(2))"),
        ("ModelParallel(ddp=True) | MPI(2)", "ModelParallel.from_distribution(ModelParallel(ddp=True) | MPI(2))"),
        (
            "{'smdistributed': {'modelparallel': {'enabled': True, 'parameters': mp}}, 'mpi': {'enabled': True, "
            "'processes_per_host': n}}",
            "ModelParallel(parameters=mp, processes_per_host=n)",
        ),
        (
            "{'smdistributed': {'modelparallel': options}, 'mpi': mpi}",
            "ModelParallel.from_distribution({'smdistributed': {'modelparallel': options}, 'mpi': mpi})",
        ),
    ],
)
def test_distributions(distribution: str, expected: str | None) -> None:
    assert (
        made(migrated(estimator(f"{CLOUD}, image_uri='i', distribution={distribution}"))).get("distributed") == expected
    )


def test_where_a_job_runs() -> None:
    here = 'entry_point="train.py", source_dir="src", instance_type="local"'
    found = made(migrated(estimator(f"{here}, framework_version='2.8', py_version='py312'")))
    assert found.keys() == {"source_code", "compute"}, "processes of this machine have no image, no mode and no limit"
    assert found["compute"] == "Compute(instance_type='local', instance_count=1)"
    found = made(migrated(estimator(f"{here}, image_uri='smp:1'")))
    assert found["training_mode"] == "Mode.LOCAL_CONTAINER"
    after = migrated(
        estimator(
            f"{here}, sagemaker_session=ProcessSession(root='jobs', keep=True)", "SMPEstimator, ProcessSession"
        ).replace("SMPEstimator, ProcessSession(", "SMPEstimator(")
    )
    assert made(after)["local_container_root"] == "'jobs'"
    assert made(after)["keep_job_folder"] == "True"
    assert "ProcessSession" not in after


def test_images() -> None:
    after = migrated(
        estimator(
            f"{CLOUD}, framework_version='2.8.0', py_version='py312', sagemaker_session=s",
            "PyTorch",
            "sagemaker.pytorch",
        )
    )
    assert made(after)["training_image"] == (
        "image_uris.retrieve('pytorch', s.boto_region_name, version='2.8.0', py_version='py312', "
        "instance_type='ml.p4d.24xlarge', image_scope='training')"
    )
    text = estimator(
        f"{CLOUD}, transformers_version='4.49', pytorch_version='2.5', py_version='py311'",
        "HuggingFace",
        "sagemaker.huggingface",
    )
    assert "base_framework_version='pytorch2.5'" in made(migrated(text))["training_image"]
    old = estimator(f"{CLOUD}, framework_version='1.13.1', py_version='py39', distribution={MODEL_PARALLEL}")
    assert "training_image" not in made(migrated(old))
    assert any("PyTorch 1.13.1 is older than the runtime's 2.4" in note for note in notes(old))


def test_an_image_that_sdk_v2_chose() -> None:
    said = notes(estimator(CLOUD, "SMPHuggingFace"))
    assert any("SMPHuggingFace took the newest Hugging Face image" in sentence for sentence in said)
    assert not notes(estimator(f"{CLOUD}, image_uri='i'", "SMPHuggingFace"))


def test_a_script_without_a_folder(tmp_path: Path) -> None:
    text = estimator('entry_point="code/train.py", instance_type="local"')
    assert made(migrated(text))["source_code"] == "SourceCode(source_dir='code', entry_script='train.py')"
    assert any("ships the whole folder" in note for note in notes(text))
    text = estimator('entry_point=script, instance_type="local"')
    assert (
        made(migrated(text))["source_code"]
        == "SourceCode(source_dir=str(Path(script).parent), entry_script=Path(script).name)"
    )


def test_requirements_are_installed_as_before(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "requirements.txt").write_text("")
    text = estimator(f"{CLOUD}, image_uri='i'")
    assert "requirements='requirements.txt'" in made(migrated(text, tmp_path))["source_code"]
    assert "requirements" not in made(migrated(text, tmp_path / "src"))["source_code"]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("job.fit()", "job.train()"),
        (
            "job.fit({'a': 's3://b', 'c': d + '/e'})",
            "job.train(input_data_config=[InputData(channel_name='a', data_source='s3://b'), "
            "InputData(channel_name='c', data_source=d + '/e')])",
        ),
        ("job.fit(inputs, wait=False)", "job.train(inputs, wait=False)"),
        ("job.fit('s3://b', True, 'None')", "job.train('s3://b', wait=True, logs=False)"),
        ("job.fit(logs='All')", "job.train()"),
        ("job.fit({'a': TrainingInput('s3://b')})", "job.train({'a': TrainingInput('s3://b')})"),
        ("job.latest_training_job.name", "job.latest_training_job.training_job_name"),
        ("job.logs()", "job.latest_training_job.wait(logs=True)"),
        ("job.model_data", "job.model_data"),
        ("job.hyperparameters()", "job.hyperparameters"),
        ("other.fit({'a': 's3://b'})", "other.fit({'a': 's3://b'})"),
    ],
)
def test_what_is_done_with_it(call: str, expected: str) -> None:
    text = "from sagemaker.inputs import TrainingInput\n" + estimator(CLOUD) + f"print(1)\n{call}\n"
    after = ast.parse(migrated(text)).body[-1]
    assert ast.unparse(after) == ast.unparse(ast.parse(expected))


def test_helpers_of_the_sdk_stand_elsewhere() -> None:
    after = migrated(
        "import sagemaker\nfrom sagemaker.inputs import TrainingInput\nfrom sagemaker import get_execution_role\n"
        f"s = sagemaker.Session()\nr = get_execution_role()\nr2 = sagemaker.get_execution_role(s)\n"
        f"{estimator(CLOUD)}job.fit(TrainingInput('x'))\n"
    )
    lines = after.splitlines()
    assert "from sagemaker.core.helper.session_helper import Session, get_execution_role" in lines
    assert "from sagemaker.core.inputs import TrainingInput" in lines
    assert "s = Session()" in lines
    assert "r2 = get_execution_role(s)" in lines
    assert "import sagemaker" not in lines


def test_what_a_person_has_to_look_at() -> None:
    text = estimator(
        f"{CLOUD}, dependencies=['lib'], git_config={{'repo': 'x'}}, debugger_hook_config=False, rules=None"
    )
    text += "job.deploy(1, 'ml.m5.large')\njob.fit(job_name='mine')\nSMPEstimator.attach('x')\n"
    said = notes(text)
    for part in (
        "dependencies=['lib'] has no place in ModelTrainer and is left out; copy them into source_dir",
        "git_config=",
        "job.deploy is not in ModelTrainer",
        "fit(job_name='mine') has no place in train()",
        "SMPEstimator.attach is not in ModelTrainer",
    ):
        assert any(part in sentence for sentence in said), f"{part!r} is not in {said}"
    assert not any("debugger_hook_config" in sentence or "rules" in sentence for sentence in said)
    said = notes(
        "from sagemaker.exceptions import UnexpectedStatusException\nfrom sagemaker.tensorflow import TensorFlow\n"
        + estimator(CLOUD)
    )
    assert any("it has FailedStatusError of sagemaker.core.utils.exceptions" in sentence for sentence in said)
    assert any("SDK v3 has no sagemaker.tensorflow.TensorFlow" in sentence for sentence in said)


def test_arguments_that_only_a_run_knows() -> None:
    text = "from smp_estimator import SMPEstimator\ngiven = {}\njob = SMPEstimator(**given)\n"
    after = migrated(text)
    assert [line for line in after.splitlines() if not line.startswith("#")] == text.splitlines()
    assert after.count(MARK) == 1
    assert migrated(after) == after, "it is marked once"
    assert "its arguments come from given" in notes(text)[0]


def test_what_was_written_stays_as_it_was() -> None:
    before = '''"""What this is."""

from smp_estimator import SMPEstimator  # ours

x = {  "odd" :1 }   # spacing
job = SMPEstimator(
    entry_point="train.py",  # the script
    source_dir="src",
    instance_type="local",
    hyperparameters={
        "a": 1,  # one
        "text": """é
  kept
""",
    },
)
if x:
    job.fit(
        {"train": "file:///d"},  # the data
    )
# the end
'''
    after = migrated(before)
    for kept in (
        'x = {  "odd" :1 }   # spacing',
        '"a": 1,  # one',
        '"text": """é\n  kept\n"""',
        "# the end",
        "# the script",
    ):
        assert kept in after, after
    assert after.index("# the script") < after.index("source_code=")
    assert migrated(after) == after, "there is nothing more to change"


def test_a_notebook(tmp_path: Path) -> None:
    def cell(source: Any, kind: str = "code") -> dict[str, Any]:
        return {
            "cell_type": kind,
            "metadata": {},
            "source": source,
            **({"outputs": [], "execution_count": 1} if kind == "code" else {}),
        }

    cells = [
        cell(["# SMPEstimator\n"], "markdown"),
        cell("%pip install x\nfrom smp_estimator import SMPEstimator"),
        cell("%%bash\nls SMPEstimator("),
        cell(["job = SMPEstimator(\n", f"    {CLOUD},\n", ")\n", "!ls"]),
        cell("job.fit({'train': 's3://b'})"),
    ]
    path = tmp_path / "n.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {"é": 1}, "nbformat": 4, "nbformat_minor": 5}))
    shown = CliRunner().invoke(main, ["migrate", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "+job = ModelTrainer(" in shown.output
    assert json.loads(path.read_text())["cells"] == cells, "only shown"
    done = CliRunner().invoke(main, ["migrate", str(path), "--write"])
    assert done.exit_code == 0, done.output
    after = json.loads(path.read_text())
    assert after["metadata"] == {"é": 1}
    text = ["".join(one["source"]) for one in after["cells"]]
    assert text[0] == "# SMPEstimator\n"
    assert text[1] == "%pip install x\n"
    assert text[2] == cells[2]["source"]
    assert text[3].endswith("!ls")
    assert "import" in text[3]
    assert isinstance(after["cells"][3]["source"], list)
    assert "InputData" in text[4]


def test_the_examples_of_this_repository(tmp_path: Path) -> None:
    for path in sorted((REPOSITORY / "examples").glob("*.py")):
        migrated(path.read_text(), path.parent)


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(estimator(f"{CLOUD}, dependencies=['lib']"))
    before = path.read_text()
    shown = CliRunner().invoke(main, ["migrate", str(path)])
    assert shown.output.startswith("--- ")
    assert "look at line 2: dependencies" in shown.output
    assert path.read_text() == before
    assert CliRunner().invoke(main, ["migrate", str(path), "--write"]).exit_code == 0
    assert "ModelTrainer" in path.read_text()
    again = CliRunner().invoke(main, ["migrate", str(path)])
    assert "nothing to change" in again.output
    path.write_text("x = (")
    assert "is not Python" in CliRunner().invoke(main, ["migrate", str(path)]).output
    (tmp_path / "n.ipynb").write_text("[]")
    assert "is no notebook" in CliRunner().invoke(main, ["migrate", str(tmp_path / "n.ipynb")]).output
    with pytest.raises(ConfigError, match=r"piece 2 of 2 is not Python"):
        migrate_sources(["x = 1", "x = ("], tmp_path)


def test_names_inside_what_a_call_keeps_are_imported() -> None:
    text = """import sagemaker
from sagemaker.pytorch import PyTorch

estimator = PyTorch(
    entry_point="train.py",
    source_dir="scripts",
    role=sagemaker.get_execution_role(),
    instance_type="ml.p4d.24xlarge",
    instance_count=1,
    image_uri="own",
    output_path="s3://" + sagemaker.Session().default_bucket() + f"/{sagemaker.Session().boto_region_name}",
    sagemaker_session=sagemaker.session.Session(),
    distribution={"smdistributed": {"modelparallel": {"enabled": True, "parameters": {"ddp": True}}}, "mpi": {"enabled": True}},
)
estimator.fit({"train": sagemaker.inputs.TrainingInput("s3://b/x")})
"""
    (after,), (notes,) = migrate_sources([text], Path())
    assert "import sagemaker\n" not in after
    assert "from sagemaker.core.helper.session_helper import Session, get_execution_role" in after
    assert "from sagemaker.core.inputs import TrainingInput" in after
    used = {ast.unparse(node) for node in ast.walk(ast.parse(after)) if isinstance(node, ast.Attribute)}
    assert not any(name.startswith("sagemaker.") for name in used)
    assert not [note for note in notes if "SDK v3 has no" in note.text]


def test_a_name_that_version_3_lacks_keeps_its_import_and_is_listed() -> None:
    text = """import sagemaker
role = sagemaker.get_execution_role()
tuner = sagemaker.tuner.HyperparameterTuner(None)
"""
    (after,), (notes,) = migrate_sources([text], Path())
    assert "import sagemaker\n" in after
    assert "role = get_execution_role()" in after
    assert [note.text for note in notes] == [
        "SDK v3 has no sagemaker.tuner.HyperparameterTuner; it has HyperparameterTuner of sagemaker.train.tuner"
    ]


def test_an_import_of_one_cell_stays_for_another() -> None:
    first = "import sagemaker\nrole = sagemaker.get_execution_role()\n"
    second = "model = sagemaker.model.Model(role)\n"
    (before, after), (_, notes) = migrate_sources([first, second], Path())
    assert "import sagemaker\n" in before
    assert after == f"{MARK} SDK v3 has no sagemaker.model.Model\n{second}"
    assert [note.text for note in notes] == ["SDK v3 has no sagemaker.model.Model"]


@pytest.mark.parametrize(("kind", "module"), [("SMPEstimator", "smp_estimator"), ("PyTorch", "sagemaker.pytorch")])
def test_version_2_of_the_library_stays_that_of_its_estimator(kind: str, module: str) -> None:
    """SMPEstimator trains with this package's, the SDK's own class with that of an image."""
    distribution = (
        '{"torch_distributed": {"enabled": True}, "smdistributed": {"modelparallel": {"enabled": True, "parameters": '
        '{"hybrid_shard_degree": 4}}}}'
    )
    text = estimator(
        f"{CLOUD}, framework_version='2.4.1', py_version='py311', distribution={distribution}", kind, module
    )
    found = made(migrated(text))
    assert found["distributed"] == "Torchrun(smp=SMP(hybrid_shard_degree=4))"
    is_ours = kind == "SMPEstimator"
    assert found["training_image"].startswith(
        "image_uris.retrieve(" if is_ours else "image_uris.get_training_image_uri("
    )
    assert any("version 2 of the model parallel library" in note for note in notes(text)) != is_ours
