"""Every stock image of the table: the request of a job in it, what travels, and the job in a Python that has what it has.

The Python is this environment's own version, whatever the row says, and the PyTorch is that of the row only where
``make test-torch`` has made an environment with it. What is of the row is what else there is: mpi4py or none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sagemaker.instance_group import InstanceGroup
from sagemaker.workflow.parameters import ParameterString
from support.documents.stock_image_page import PAGE, written
from support.platform.cloud import Cloud, service
from support.platform.command_line import call, flat
from support.platform.jobs import model_parallel
from support.platform.stock_images import (
    DATA_PARALLEL_STEP,
    DAY,
    STEP,
    ImagePython,
    found_by_ranks,
    make_wheels,
    started_by_toolkit,
    torch_sites,
    unpacked,
)

from smp_config.version import __version__
from smp_estimator import SMPEstimator, SMPHuggingFace
from smp_estimator.cloud import image_table, images, source
from smp_estimator.sdk.installed import installed_version

if TYPE_CHECKING:
    from smp_estimator.cloud.image_table import TrainingImage

REGISTRY = "763104351884.dkr.ecr.us-east-1.amazonaws.com"

ROWS = image_table.images()

#: A job of two ranks takes seconds; on a machine that does much else at once it has been a minute and a half.
pytestmark = pytest.mark.timeout(300)

INSTANCES = {"cpu": "ml.c5.18xlarge", "gpu": "ml.p4d.24xlarge"}

DATA_PARALLEL = {
    "smdistributed": {"dataparallel": {"enabled": True}},
    "mpi": {"enabled": True, "processes_per_host": 2},
}


def sampled(*names: str) -> list[Any]:
    """All rows, those that are not named as part of the whole matrix."""
    marks = {row: () if row.tag in names else (pytest.mark.full,) for row in ROWS}
    assert sum(not mark for mark in marks.values()) == len(names)
    return [pytest.param(row, id=row.name, marks=mark) for row, mark in marks.items()]


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with service() as boto:
        yield Cloud(boto)


@pytest.fixture
def asked(cloud: Cloud, script: Path) -> Any:
    """``asked(row, distribution)`` → the request of a job in that image, asked for by its address."""

    def ask(row: TrainingImage, distribution: dict[str, Any], text: str = STEP, **given: Any) -> dict[str, Any]:
        (script / "train.py").write_text(text)
        (script / "requirements.txt").write_text("sentencepiece\n")
        cloud.requests.clear()
        kind = SMPEstimator if row.transformers is None else SMPHuggingFace
        arguments = {"image_uri": f"{REGISTRY}/{row.name}", "instance_type": INSTANCES[row.processor], **given}
        kind(**cloud.arguments(script, **arguments, distribution=distribution)).fit(wait=False)
        return cloud.requests[0]

    return ask


# -- the table -----------------------------------------------------------------------------------------------


def test_the_table() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.processor in INSTANCES, row
        assert (row.cuda is None) is (row.processor == "cpu"), row
        assert row.patched_until or row.listed, "without a day its patches would never end"
        assert row.released is None or row.last_patches is None or row.released < row.last_patches
        assert row.sources, row
        assert set(row.sources) <= set(image_table.sources()), row
        assert image_table.row_of(f"{REGISTRY}/{row.name}") is row
        assert image_table.row_of(f"{REGISTRY}/{row.name}@sha256:01") is row
        assert images.is_stock(f"{REGISTRY}/{row.name}")
    for said in image_table.sources().values():
        assert re.fullmatch(r"[0-9a-f]{40}|\d+\.\d+\.\d+", said["at"])
        assert date(2026, 1, 1) < date.fromisoformat(said["date"]) < date(2027, 1, 1)


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("pytorch:2.13.0-cu133-amzn2023-sagemaker-v1.4", "pytorch:2.13-cu133-amzn2023-sagemaker"),
        ("pytorch-training:2.8-gpu-py312-cu129-ubuntu22.04-sagemaker-v1", "pytorch-training:2.8.0-gpu-py312"),
        ("pytorch-training:2.8.0-cpu-py312", "pytorch-training:2.8.0-cpu-py312"),
        ("pytorch-training:2.13.0-gpu-py312", None),
        ("pytorch:2.8.0-gpu-py312", None),
        ("pytorch:2.99-cu133-amzn2023-sagemaker", None),
        ("pytorch@sha256:01", None),
        ("huggingface-pytorch-training:2.8.0-transformers4.0.0-gpu-py312", None),
    ],
)
def test_rows_are_found_by_other_tags_of_the_same_image(uri: str, name: str | None) -> None:
    row = image_table.row_of(f"{REGISTRY}/{uri}")
    assert (row.name if row is not None else None) == name


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page), "run python tests/support/documents/stock_image_page.py"


def test_the_command() -> None:
    said = flat(call("images", "--on", "2026-11-23"))
    assert f"{len(ROWS)} of {len(ROWS)} images, on 2026-11-23" in said
    assert "pytorch:2.13-cu133-amzn2023-sagemaker │ 2.13.0 │ 3.12 │ 13.3 │ 2027-07-20 │ no │ no" in said
    assert "2.14 │ ? │ 13.3 │ 2027-10-21 at the latest │ ? │ ?" in said
    for named in image_table.sources().values():
        assert f"{named['at']}, {named['date']}" in said
    assert f"default with SageMaker SDK {installed_version()}: pytorch" in said

    patched = [row for row in ROWS if not row.has_ended(DAY)]
    assert f"{len(patched)} of {len(ROWS)} images, on {DAY}" in flat(call("images", "--patched"))
    said = flat(call("images", "--patched", "--region", "cn-north-1"))
    assert f"{len(patched) - 2} of {len(ROWS)} images" in said, "without 2.14"
    said = flat(call("images", "--patched", "--instance-type", "ml.p3.16xlarge"))
    assert f"{len([row for row in patched if row.processor == 'cpu'])} of {len(ROWS)} images" in said
    assert ": pytorch-training:2.8.0-gpu-py312; the stock images with PyTorch 2.8.0" in said
    assert "which the catalogue of GPU instances does not have" in flat(
        call("images", "--instance-type", "ml.x1", code=1)
    )


def test_the_command_without_an_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smp_estimator.sdk.functions.installed_major", lambda: None)
    assert "default: the SageMaker SDK is not installed" in flat(call("images"))


# -- the request, and what travels ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    sampled(
        "2.10.0-cpu-py313", "2.13-cu133-amzn2023-sagemaker", "2.8.0-transformers4.56.2-gpu-py312-cu129-ubuntu22.04"
    ),
)
def test_the_request_and_what_travels(row: TrainingImage, asked: Any, cloud: Cloud, tmp_path: Path) -> None:
    request = asked(row, model_parallel(8, ddp=True))
    image = f"{REGISTRY}/{row.name}"
    assert request["AlgorithmSpecification"]["TrainingImage"] == image
    carried = {name: json.loads(value) for name, value in request["HyperParameters"].items()}
    assert (carried["sagemaker_program"], carried["sagemaker_smp_program"]) == ("_smp_entry.py", "train.py")
    assert (carried["sagemaker_mpi_enabled"], carried["sagemaker_mpi_num_of_processes_per_host"]) == (True, 8)
    code = unpacked(cloud.boto, request, tmp_path / "code")
    wheel = f"smp_estimator-{__version__}-py3-none-any.whl"
    assert sorted(path.name for path in code.iterdir()) == sorted(
        ["helper.py", "requirements.txt", "_smp_entry.py", "train.py", wheel]
    )
    lines = (code / "requirements.txt").read_text().splitlines()
    assert lines[0] == "sentencepiece"
    assert lines.count("mpi4py") == 1, "it is installed where the image lacks it, and left alone where it does not"

    if row.transformers is None:
        by_version = asked(row, model_parallel(8, ddp=True), image_uri=None, framework_version=row.torch)
        assert by_version["AlgorithmSpecification"]["TrainingImage"] == image

    if images.version_numbers(row.torch) >= images.DATA_PARALLEL_FLOOR:
        asked(row, DATA_PARALLEL if row.processor == "cpu" else {**DATA_PARALLEL, "mpi": {"enabled": True}})
        carried = cloud.carried()
        assert (carried["sagemaker_program"], carried["sagemaker_mpi_enabled"]) == ("_smp_entry.py", True)
        assert carried["sagemaker_distributed_dataparallel_enabled"] is True


def test_attach_and_train_again(cloud: Cloud, script: Path, asked: Any) -> None:
    """The SDK cannot read a version from the newer repository's tags: the image stays the one of the job."""
    row = image_table.rows_of("2.13")["gpu"]
    first = asked(row, model_parallel(8, ddp=True), image_uri=None, framework_version="2.13")
    attached = SMPEstimator.attach(first["TrainingJobName"], sagemaker_session=cloud.session)
    assert attached.training_image_uri() == f"{REGISTRY}/{row.name}"
    assert attached.entry_point == "train.py"
    attached.fit(wait=False)
    second = cloud.requests[-1]
    assert second["AlgorithmSpecification"]["TrainingImage"] == first["AlgorithmSpecification"]["TrainingImage"]
    for name in ("sagemaker_submit_directory", "sagemaker_program", "sagemaker_smp_program"):
        assert second["HyperParameters"][name] == first["HyperParameters"][name]


def test_instances_that_are_known_later(cloud: Cloud, script: Path) -> None:
    """A pipeline's parameter counts as its default, and of groups those with GPUs count."""
    named = {"image_uri": None, "framework_version": "2.13", "instance_type": None, "instance_count": None}
    gpu, cpu = (f"{REGISTRY}/{image_table.rows_of('2.13')[kind].name}" for kind in ("gpu", "cpu"))
    for kind, image in (("ml.p4d.24xlarge", gpu), ("ml.c5.18xlarge", cpu)):
        parameter = ParameterString("Type", default_value=kind)
        given = {**named, "instance_type": parameter, "instance_count": 1}
        made = cloud.estimator(script, **given, distribution=model_parallel(2, ddp=True))
        assert made.training_image_uri() == image
    groups = [InstanceGroup("feed", "ml.c5.18xlarge", 1), InstanceGroup("train", "ml.p4d.24xlarge", 2)]
    distribution = {**model_parallel(8, ddp=True), "instance_groups": [groups[1]]}
    made = cloud.estimator(script, **named, instance_groups=groups, distribution=distribution)
    assert made.training_image_uri() == gpu
    made.framework_version = "2.8.0"
    assert "/pytorch-training:2.8.0-gpu-py312" in made.training_image_uri(), "what was changed since counts"


# -- the job -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``prepared(row, code)`` → a Python with what the image has, and with the code's requirements installed in it.

    Images that have the same, with the same requirements, share one: it was made and filled for the first of them.
    """
    wheels = make_wheels(map(_name, source.travelling_requirements()), tmp_path_factory.mktemp("index") / "wheels")
    made: dict[Any, ImagePython] = {}

    def prepare(row: TrainingImage, code: Path) -> ImagePython:
        has_mpi4py, has_smddp = row.mpi4py is True, row.smddp is True  # where no source says it, they are not there
        torch = torch_sites().get(_short(row.torch))
        key = has_mpi4py, has_smddp, torch, (code / "requirements.txt").read_text()
        if key in made:
            return made[key]
        folder = tmp_path_factory.mktemp("image") / "venv"
        made[key] = python = ImagePython(folder, mpi4py=has_mpi4py, smddp=has_smddp, site=torch)
        there = {name for name in ("torch", "mpi4py", "smdistributed", "pydantic", "smp_config") if python.has(name)}
        assert there == {"torch", *(["mpi4py"] if has_mpi4py else []), *(["smdistributed"] if has_smddp else [])}
        python.install_requirements(code, wheels)
        assert python.has("mpi4py")
        assert (python.site / "mpi4py").is_symlink() is has_mpi4py, "one that an image has was built for its MPI"
        return python

    return prepare


@pytest.fixture
def started(asked: Any, cloud: Cloud, prepared: Any, tmp_path: Path) -> Any:
    """``started(row, distribution, script, words)`` → what the ranks of a job found, in a Python with what the image has.

    By the toolkit's own steps: the source is unpacked, its requirements are installed, mpirun starts ``python -m mpi4py``.
    """

    def start(
        row: TrainingImage, distribution: dict[str, Any], text: str, words: list[str], **environment: str
    ) -> list[Any]:
        sent = asked(row, distribution, text, instance_type=INSTANCES["cpu"])
        code = unpacked(cloud.boto, sent, tmp_path / "code")
        needed = code / "requirements.txt"
        needed.write_text(needed.read_text().replace("sentencepiece\n", ""))  # the user's, which is not at hand
        python = prepared(row, code)
        carried = {name: value for name, value in cloud.carried().items() if name.startswith("sagemaker_")}
        environment |= {"SM_FRAMEWORK_PARAMS": json.dumps(carried), "SM_HPS": "{}", "TMPDIR": str(tmp_path)}
        return found_by_ranks(started_by_toolkit(code, words, python.program, **environment))

    return start


@pytest.mark.job
@pytest.mark.parametrize("row", sampled("2.13-cu133-amzn2023-sagemaker"))
def test_a_model_parallel_job(row: TrainingImage, started: Any) -> None:
    distribution = model_parallel(2, ddp=True)
    parameters = json.dumps({"ddp": True, "partitions": 1, "pipeline_parallel_degree": 1})
    words = ["--mp_parameters", "ddp=True"]
    found = started(row, distribution, STEP, words, SM_HP_MP_PARAMETERS=parameters)
    assert [rank[:2] for rank in found] == [[0, 0], [1, 1]]
    assert all("/smp-site-" in rank[2] and rank[3] == words for rank in found)


@pytest.mark.full
@pytest.mark.job
@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if images.version_numbers(row.torch) >= images.DATA_PARALLEL_FLOOR],
    ids=lambda row: row.name,
)
def test_a_data_parallel_job(row: TrainingImage, started: Any) -> None:
    found = started(row, DATA_PARALLEL, DATA_PARALLEL_STEP, [], MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    assert [(rank[0], rank[4], rank[5]) for rank in found] == [(0, "smddp", 1.5), (1, "smddp", 1.5)]
    assert all("/smp-site-" in rank[2] for rank in found)


@pytest.mark.job
def test_without_its_requirements_such_an_image_starts_nothing(asked: Any, cloud: Cloud, tmp_path: Path) -> None:
    """What the toolkit's command says in an image without mpi4py: the runtime has no chance to say more."""
    row = image_table.rows_of("2.13")["gpu"]
    code = unpacked(cloud.boto, asked(row, model_parallel(2, ddp=True)), tmp_path / "code")
    python = ImagePython(tmp_path / "image", mpi4py=False)
    done = started_by_toolkit(code, [], python.program, ranks=1)
    assert done.returncode != 0
    assert "No module named mpi4py" in done.stderr


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~]", requirement)[0]


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])
