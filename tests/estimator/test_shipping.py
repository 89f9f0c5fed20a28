"""The runtime travels with the code: the wheel, the uploaded source, and what starts the script in a stock image."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.platform.cloud import IMAGE, Cloud, service
from support.platform.jobs import model_parallel
from support.platform.stock_images import (
    DATA_PARALLEL_STEP,
    DAY,
    STEP,
    found_by_ranks,
    started_by_toolkit,
    unpacked,
)

from smp_config import ConfigError
from smp_config.version import __version__
from smp_estimator import SMPEstimator, SMPHuggingFace
from smp_estimator.cloud import entry, image_table, images, source
from smp_estimator.sdk.functions import config_for_framework

WHEEL = f"smp_estimator-{__version__}-py3-none-any.whl"

DATA_PARALLEL = {"smdistributed": {"dataparallel": {"enabled": True}}}

STOCK = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:%s-gpu-py312"

#: In the repository of PyTorch 2.11 and later, without AWS's own data parallel library.
NEWER = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.11-cu130-amzn2023-sagemaker"

#: Prints what it got; stands for a training script.
SCRIPT = """
import json, os, sys
import helper
import smp_config, smdistributed.modelparallel
print(json.dumps({
    "name": __name__, "argv": sys.argv, "path": sys.path[:2], "smdistributed": smdistributed.modelparallel.__file__,
    "config": smp_config.__file__, "instances": smp_config.machine.instances.instance("ml.p4d.24xlarge").gpus,
    "host": os.environ["SMP_HOST"], "pythonpath": os.environ["PYTHONPATH"].split(os.pathsep)[0],
}))
"""


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with service() as boto:
        yield Cloud(boto)


def started(code: Path, *words: str, foreign: Path | None = None, tmp: Path, **environment: str) -> Any:
    """What the platform does in a container: start the program in the code directory."""
    import smp_config

    # In a checkout our packages are importable anyway; a site of its own hides them as an image would.
    hidden = (
        "import sys; sys.path[:] = [p for p in sys.path if %r not in p or 'site-packages' in p]; "
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]"
    )
    source = str(Path(smp_config.__file__).parents[2])
    (tmp / "sitecustomize.py").write_text(hidden % source)
    if not list(tmp.glob("torch-*.dist-info")):
        image_has_torch(tmp, "2.6.0")
    path = [str(code), str(tmp), *([str(foreign)] if foreign else [])]
    return subprocess.run(
        [sys.executable, entry_program(code), *words],
        cwd=code,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(path),
            "TMPDIR": str(tmp),
            "SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_smp_program": "train.py"}),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


def image_has_torch(site: Path, version: str) -> None:
    """What pip would have left of it, which is all that is looked at."""
    info = site / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")


def entry_program(code: Path) -> str:
    return str(code / "_smp_entry.py")


def test_both_sides_have_one_floor() -> None:
    assert entry.TORCH_FLOOR == images.TORCH_FLOOR
    assert entry._DATA_PARALLEL_FLOOR == images.DATA_PARALLEL_FLOOR


@pytest.fixture
def shipped(cloud: Cloud, script: Path, tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """A request of a job in the stock image, and its uploaded source."""
    (script / "train.py").write_text(SCRIPT)
    (script / "helper.py").write_text("import smp_config.machine.instances")
    (script / "requirements.txt").write_text("sentencepiece")
    (script / "folder").mkdir()
    (script / "folder" / "data.txt").write_text("data")
    cloud.requests.clear()
    job = cloud.estimator(
        script, image_uri=None, distribution=model_parallel(8, ddp=True), dependencies=[str(script / "folder")]
    )
    given = job.entry_point, job.source_dir
    job.fit(wait=False)
    assert (job.entry_point, job.source_dir) == given
    return cloud.requests[0], unpacked(cloud.boto, cloud.requests[0], tmp_path / "code")


def test_stock_image_and_source(cloud: Cloud, shipped: tuple[dict[str, Any], Path], built: Path) -> None:
    request, code = shipped
    image = request["AlgorithmSpecification"]["TrainingImage"]
    row = image_table.row_of(image)
    assert images.is_stock(image)
    assert row is None or not row.has_ended(DAY), "one that is younger than the table, or the newest that is patched"
    assert cloud.carried()["sagemaker_program"] == "_smp_entry.py"
    assert cloud.carried()["sagemaker_smp_program"] == "train.py"
    assert sorted(path.name for path in code.iterdir()) == sorted(
        ["folder", "helper.py", "requirements.txt", "_smp_entry.py", "train.py", WHEEL]
    )
    assert not [path for path in code.rglob("*") if path.is_symlink()]
    assert (code / WHEEL).read_bytes() == built.read_bytes()
    lines = (code / "requirements.txt").read_text().splitlines()
    assert lines[0] == "sentencepiece"
    assert set(source.travelling_requirements()) <= set(lines)


def test_the_job_s_runtime_wins_over_the_image_s(shipped: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    _, code = shipped
    foreign = tmp_path / "image"
    for package in ("smdistributed", "smdistributed/modelparallel", "smp_runtime"):
        (foreign / package).mkdir(parents=True, exist_ok=True)
        (foreign / package / "__init__.py").write_text("raise RuntimeError('the image has another one')")
    config = tmp_path / "ml/input/config"
    config.mkdir(parents=True)
    (config / "resourceconfig.json").write_text('{"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]}')
    done = started(
        code,
        "--steps",
        "3",
        foreign=foreign,
        tmp=tmp_path,
        SAGEMAKER_BASE_DIR=str(tmp_path / "ml"),
        SM_CURRENT_HOST="algo-1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    notice, last = done.stdout.splitlines()
    assert notice == f"[smp] the smdistributed in {foreign} is not used: the job brought its own"
    seen = json.loads(last)
    site = seen["path"][0]
    assert Path(site).name.startswith("smp-site-")
    assert seen["smdistributed"].startswith(site)
    assert seen["config"].startswith(site)
    assert seen["pythonpath"] == site, "children of the script get it too"
    assert seen["path"][1] == str(code)
    assert seen["name"] == "__main__"
    assert seen["argv"] == [str(code / "train.py"), "--steps", "3"]
    assert seen["instances"] == 8
    assert seen["host"] == "algo-2", "the platform's variable has the leader's name on every host"
    again = started(code, tmp=tmp_path)
    assert json.loads(again.stdout)["path"][0] == site, "unpacked once per host"


def test_an_import_hook_that_would_win_is_an_error(shipped: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    _, code = shipped
    (tmp_path / "other" / "smdistributed").mkdir(parents=True)
    (tmp_path / "other" / "smdistributed" / "__init__.py").write_text("")
    (tmp_path / "helper_hook.py").write_text(
        f"""
import sys
from importlib.machinery import PathFinder

class Hook:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [{str(tmp_path / "other")!r}]) if name == "smdistributed" else None

sys.meta_path.insert(0, Hook)
import runpy
sys.argv[0] = "_smp_entry.py"
runpy.run_path("_smp_entry.py", run_name="__main__")
"""
    )
    image_has_torch(tmp_path, "2.6.0")
    environment = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "helper_hook"], cwd=code, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "the image's own smdistributed" in done.stderr
    assert "remove that package from the image" in done.stderr


def test_an_old_image_fails_in_words(shipped: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    _, code = shipped
    image_has_torch(tmp_path, "1.13.1")
    done = started(code, tmp=tmp_path)
    assert done.returncode == 1
    assert "the image has PyTorch 1.13.1, and the model parallel runtime needs 2.4 or newer" in done.stderr


def test_a_script_alone_and_a_shell_script(cloud: Cloud, script: Path, tmp_path: Path) -> None:
    (script / "run.sh").write_text('echo "shell $1 $(basename ${PYTHONPATH%%:*})"; exit 3')
    job = cloud.estimator(
        script,
        image_uri=None,
        entry_point=str(script / "run.sh"),
        source_dir=None,
        distribution=model_parallel(8, ddp=True),
    )
    job.fit(wait=False)
    code = unpacked(cloud.boto, cloud.requests[-1], tmp_path / "code")
    assert sorted(path.name for path in code.iterdir()) == sorted(
        ["requirements.txt", "run.sh", "_smp_entry.py", WHEEL]
    )
    done = started(code, "a", tmp=tmp_path, SM_FRAMEWORK_PARAMS='{"sagemaker_smp_program": "run.sh"}')
    assert done.returncode == 3
    assert done.stdout.startswith("shell a smp-site-")


def test_attach_and_train_again(cloud: Cloud, script: Path) -> None:
    job = cloud.estimator(script, image_uri=None, framework_version="2.4", distribution=model_parallel(8, ddp=True))
    job.fit(wait=False)
    first = cloud.requests[-1]
    attached = SMPEstimator.attach(job.latest_training_job.name, sagemaker_session=cloud.session)
    assert attached.entry_point == "train.py"
    assert attached.framework_version == "2.4"
    assert attached._hyperparameters == {}
    attached.fit(wait=False)
    second = cloud.requests[-1]
    assert second["AlgorithmSpecification"]["TrainingImage"] == first["AlgorithmSpecification"]["TrainingImage"]
    for name in ("sagemaker_submit_directory", "sagemaker_program", "sagemaker_smp_program"):
        assert second["HyperParameters"][name] == first["HyperParameters"][name]
    assert job.create_model()._script_mode_env_vars()["SAGEMAKER_PROGRAM"] == "train.py"


def test_when_the_runtime_stays_at_home(cloud: Cloud, script: Path) -> None:
    stock = STOCK % "2.6.0"
    smp = {"distribution": model_parallel(8, ddp=True)}

    def program(**given: Any) -> str:
        cloud.estimator(script, **given).fit(wait=False)
        return str(cloud.carried()["sagemaker_program"])

    assert program(**smp) == "train.py", "an image of one's own has the runtime"
    assert program(**smp, image_uri=stock) == "_smp_entry.py"
    assert program(**smp, image_uri=stock, ship_runtime=False) == "train.py"
    assert program(**smp, ship_runtime=True) == "_smp_entry.py"
    plain = {"image_uri": None, "framework_version": "2.5.1", "py_version": "py311"}
    assert program(**plain, distribution={"torch_distributed": {"enabled": True}}) == "train.py"


def test_what_cannot_travel(cloud: Cloud, script: Path) -> None:
    smp = {"distribution": model_parallel(8, ddp=True), "image_uri": None}
    remote = cloud.estimator(script, **smp, source_dir="s3://bucket/code/sourcedir.tar.gz")
    with pytest.raises(ConfigError, match=r"source_dir is s3://.*use a local source_dir, or image_uri"):
        remote.fit(wait=False)
    (script / "_smp_entry.py").write_text("")
    with pytest.raises(ConfigError, match=r"holds a file _smp_entry\.py.*rename it"):
        cloud.estimator(script, **smp).fit(wait=False)


def test_a_package_is_discovered_as_without_the_runtime(cloud: Cloud, script: Path) -> None:
    """The toolkit installs code with a ``setup.py`` by pip; two modules at the top would be an error there."""
    discovery = pytest.importorskip("setuptools.discovery")
    (script / "helper.py").unlink()
    (script / "setup.py").write_text("from setuptools import setup\nsetup(name='train')\n")
    with source.with_runtime("train.py", str(script)) as folder:
        assert discovery.FlatLayoutModuleFinder.find(str(folder)) == ["train"]


def ran_as_by_the_toolkit(code: Path, tmp_path: Path, words: list[str], **environment: str) -> list[Any]:
    """What a job's ranks found in the unpacked source, the image's own library in the way."""
    foreign = tmp_path / "image" / "smdistributed"
    foreign.mkdir(parents=True)
    (foreign / "__init__.py").write_text("raise RuntimeError('the image has another one')")
    done = started_by_toolkit(code, words, PYTHONPATH=str(foreign.parent), TMPDIR=str(tmp_path), **environment)
    assert done.stdout.count("is not used: the job brought its own") == 1, done.stdout + done.stderr
    return found_by_ranks(done)


@pytest.mark.full
@pytest.mark.job
def test_ranks_as_the_platform_s_toolkit_starts_them(cloud: Cloud, script: Path, tmp_path: Path) -> None:
    (script / "train.py").write_text(STEP)
    cloud.estimator(script, image_uri=None, distribution=model_parallel(2, ddp=True)).fit(wait=False)
    found = ran_as_by_the_toolkit(
        unpacked(cloud.boto, cloud.requests[-1], tmp_path / "code"),
        tmp_path,
        ["--mp_parameters", "ddp=True"],
        SM_FRAMEWORK_PARAMS=json.dumps({"sagemaker_smp_program": "train.py", "sagemaker_mpi_enabled": True}),
        SM_HP_MP_PARAMETERS=json.dumps(cloud.carried()["mp_parameters"]),
        SM_HPS="{}",
    )
    assert [rank[:2] for rank in found] == [[0, 0], [1, 1]]
    assert all("/smp-site-" in rank[2] and rank[3] == ["--mp_parameters", "ddp=True"] for rank in found)


@pytest.mark.job
def test_ranks_of_a_data_parallel_job_in_a_stock_image(cloud: Cloud, script: Path, tmp_path: Path) -> None:
    (script / "train.py").write_text(DATA_PARALLEL_STEP)
    cloud.estimator(script, image_uri=None, distribution=DATA_PARALLEL).fit(wait=False)
    carried = cloud.carried()
    found = ran_as_by_the_toolkit(
        unpacked(cloud.boto, cloud.requests[-1], tmp_path / "code"),
        tmp_path,
        ["--epochs", "3"],
        SM_FRAMEWORK_PARAMS=json.dumps(
            {name: value for name, value in carried.items() if name.startswith("sagemaker_")}
        ),
        MASTER_ADDR="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
    )
    for rank, (number, local, older, words, backend, gradient, variables) in enumerate(found):
        assert (number, local, words, backend) == (rank, rank, ["--epochs", "3"], "smddp")
        assert "/smp-site-" in older
        assert gradient == 1.5, "3 rows of ones and of zeros, averaged"
        assert variables[:6] == [str(rank), "2", str(rank), "2", str(rank), "127.0.0.1"]
    assert len(found) == 2


@pytest.mark.parametrize(
    ("given", "image", "ships"),
    [
        ({}, "amazonaws.com/pytorch", True),
        ({"framework_version": "2.13"}, "/pytorch:2.13-cu133-amzn2023-sagemaker", True),
        ({"image_uri": NEWER}, "/pytorch:2.11-cu130-amzn2023-sagemaker", True),
        ({"framework_version": "2.6"}, "pytorch-training:2.6-gpu", True),
        ({"image_uri": STOCK % "2.7.1"}, "pytorch-training:2.7.1-gpu", True),
        ({"framework_version": "2.0.1", "py_version": "py310"}, "pytorch-training:2.0.1-gpu", False),
        ({"image_uri": STOCK % "2.2.0"}, "pytorch-training:2.2.0-gpu", False),
        ({"image_uri": STOCK % "2.5.1"}, "pytorch-training:2.5.1-gpu", False),
        ({"image_uri": IMAGE}, "smp:1", False),
        ({"image_uri": IMAGE, "ship_runtime": True}, "smp:1", True),
    ],
)
def test_the_runtime_of_a_data_parallel_job(
    cloud: Cloud, script: Path, given: dict[str, Any], image: str, ships: bool
) -> None:
    """It travels where the image has none: not into old images, which have the library of their time."""
    cloud.estimator(script, **{"image_uri": None, **given}, distribution=DATA_PARALLEL).fit(wait=False)
    assert image in cloud.requests[-1]["AlgorithmSpecification"]["TrainingImage"]
    carried = cloud.carried()
    assert carried["sagemaker_program"] == ("_smp_entry.py" if ships else "train.py")
    assert carried["sagemaker_distributed_dataparallel_enabled"] is True
    # By mpirun: the launcher's other way needs a program of the image's library. It counts the GPUs itself.
    assert carried.get("sagemaker_mpi_enabled") is (True if ships else None)
    assert "sagemaker_mpi_num_of_processes_per_host" not in carried


def test_a_data_parallel_job_is_sent_and_attached_to(cloud: Cloud, script: Path) -> None:
    options = {"enabled": True, "custom_mpi_options": "-verbose -x NCCL_DEBUG=INFO"}
    job = cloud.estimator(
        script,
        image_uri=None,
        distribution={"smdistributed": {"dataparallel": options}},
        environment={"SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "16384"},
    )
    job.fit(wait=False)
    first = cloud.carried()
    assert first["sagemaker_mpi_custom_mpi_options"] == (
        "-x FI_PROVIDER=efa -x NCCL_PROTO=simple -x FI_EFA_USE_DEVICE_RDMA=1 -x SMDDP_AG_SORT_BUFFER_SIZE_BYTES=16384 "
        "-verbose -x NCCL_DEBUG=INFO"
    )
    attached = SMPEstimator.attach(job.latest_training_job.name, sagemaker_session=cloud.session)
    assert attached.entry_point == "train.py"
    assert attached.distribution["smdistributed"] == {"dataparallel": options}
    attached.fit(wait=False)
    again = cloud.carried()
    for name in first.keys() - {"sagemaker_job_name"}:
        assert again[name] == first[name], name


def test_a_stock_image_that_is_too_old_for_the_backend(cloud: Cloud, script: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"framework_version is 2\.5, but the backend smddp needs PyTorch 2\.6 or newer.*'2\.6"
    ):
        cloud.estimator(script, image_uri=None, framework_version="2.5", distribution=DATA_PARALLEL)
    cpu = (STOCK % "2.5.1").replace("-gpu-", "-cpu-")
    with pytest.raises(
        ConfigError, match=r"a stock image with PyTorch 2\.5\.1, but the backend smddp needs PyTorch 2\.6"
    ):
        cloud.estimator(script, image_uri=cpu, distribution=DATA_PARALLEL)


def test_a_data_parallel_job_of_hugging_face(cloud: Cloud, script: Path) -> None:
    given = cloud.arguments(script, image_uri=None, distribution=DATA_PARALLEL)
    rows = config_for_framework("huggingface")["training"]["versions"].values()
    if not any(name.startswith(("pytorch2.6", "pytorch2.7", "pytorch2.8")) for row in rows for name in row):
        with pytest.raises(ConfigError, match=r"no Hugging Face training image with PyTorch 2\.6 or newer"):
            SMPHuggingFace(**given)
        return
    SMPHuggingFace(**given).fit(wait=False)
    assert "huggingface-pytorch-training:2." in cloud.requests[-1]["AlgorithmSpecification"]["TrainingImage"]
    carried = cloud.carried()
    assert (carried["sagemaker_program"], carried["sagemaker_mpi_enabled"]) == ("_smp_entry.py", True)
