"""What the service, or the job that it has started, would refuse: said by the estimator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.platform.cloud import Cloud, service
from support.platform.fake_jobs import forget_account
from support.platform.jobs import model_parallel

from smp_config import ConfigError

DATA_PARALLEL = {"smdistributed": {"dataparallel": {"enabled": True}}}


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with service() as boto:
        yield Cloud(boto)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"output_path": "/tmp/x"}, r"output_path is '/tmp/x', which is no s3:// address.*output_path='s3://"),
        ({"checkpoint_s3_uri": "file:///tmp/x"}, "checkpoint_s3_uri is 'file:///tmp/x', which is no s3:// address"),
        ({"code_location": "bucket/x"}, "code_location is 'bucket/x'"),
        ({"base_job_name": "my_job name!"}, "base_job_name is 'my_job name!'.* write base_job_name='my-job-name'"),
    ],
)
def test_places_and_names(cloud: Cloud, script: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cloud.estimator(script, distribution=model_parallel(8, ddp=True), **given)
    cloud.estimator(script, output_path="s3://bucket/x", base_job_name="my-job")


@pytest.fixture
def defaults(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A defaults file of the SDK; gives its environment."""
    environment = {"HTTPS_PROXY": "http://proxy:3128"}
    training_job = {"Environment": environment, "EnableNetworkIsolation": True}
    config = {**cloud.session.sagemaker_config}
    config["SageMaker"] = {**config["SageMaker"], "TrainingJob": training_job}
    monkeypatch.setattr(cloud.session, "sagemaker_config", config)
    return environment


@pytest.mark.parametrize("own", [None, {"MINE": "1"}])
def test_the_environment_of_the_defaults_file_is_sent_with_what_arguments_add(
    cloud: Cloud, script: Path, defaults: dict[str, str], own: dict[str, str] | None
) -> None:
    distribution = model_parallel(8, ddp=True)
    distribution["mpi"]["custom_mpi_options"] = "-x SMDDP_AG_SORT_BUFFER_SIZE_BYTES=16384"
    cloud.estimator(script, distribution=distribution, environment=own, max_restarts=2).fit(wait=False)
    sent = cloud.requests[-1]["Environment"]
    added = {"SMP_MAX_RESTARTS": "2", "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "16384"}
    assert sent == {**(own or defaults), **added}, "what an argument gives replaces the file's, as in the SDK"


def test_isolation_of_the_defaults_file_is_warned_of(
    cloud: Cloud, script: Path, defaults: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    cloud.estimator(script, distribution=model_parallel(8, ddp=True))
    assert "enable_network_isolation" not in caplog.text, "an image with the runtime needs no network"
    cloud.estimator(script, distribution=model_parallel(8, ddp=True), image_uri=None)
    assert "enable_network_isolation is True" in caplog.text


def test_docker_on_this_machine_writes_to_folders(cloud: Cloud, script: Path, tmp_path: Path) -> None:
    from sagemaker.local import LocalSession

    local = {"instance_type": "local", "instance_count": 1, "sagemaker_session": LocalSession(cloud.boto)}
    cloud.estimator(script, **local, output_path=f"file://{tmp_path}", distribution=DATA_PARALLEL)


def test_a_data_parallel_job_in_an_image_with_its_own_library_is_the_sdk_s_to_check(cloud: Cloud, script: Path) -> None:
    stock = {"image_uri": None, "distribution": DATA_PARALLEL, "py_version": "py311"}
    with pytest.raises(ValueError, match=r"framework_version 2\.5 is not supported by smdataparallel"):
        cloud.estimator(script, **stock, framework_version="2.5", ship_runtime=False)
    assert cloud.estimator(script, **{**stock, "py_version": "py310"}, framework_version="2.0.1").hyperparameters()
    assert cloud.estimator(script, distribution=DATA_PARALLEL).distribution == DATA_PARALLEL


def test_a_quoted_option_in_a_stock_image(cloud: Cloud, script: Path) -> None:
    distribution = model_parallel(8, ddp=True)
    distribution["mpi"]["custom_mpi_options"] = '-x "NCCL_ALGO=Ring Tree"'
    assert cloud.estimator(script, distribution=distribution).hyperparameters()
    with pytest.raises(ConfigError, match="environment={'NCCL_ALGO': 'Ring Tree'}"):
        cloud.estimator(script, distribution=distribution, image_uri=None)


def test_a_script_of_no_known_kind(cloud: Cloud, script: Path) -> None:
    (script / "train").write_text("#!/bin/sh\n")
    with pytest.raises(ConfigError, match="entry_point is 'train', whose ending is 'empty'"):
        cloud.estimator(script, entry_point="train", distribution=model_parallel(8, ddp=True)).fit(wait=False)
    cloud.estimator(script, entry_point="train").fit(wait=False)  # the platform's own launcher runs any command


def test_requirements_that_contradict(cloud: Cloud, script: Path) -> None:
    (script / "requirements.txt").write_text("pydantic==1.*\n")
    job = cloud.estimator(script, distribution=model_parallel(8, ddp=True), image_uri=None)
    with pytest.raises(ConfigError, match="no version of pydantic is both"):
        job.fit(wait=False)


@pytest.mark.parametrize(
    ("links", "said"),
    [
        ({"gone": "nowhere"}, "holds the link gone to nowhere, which does not exist"),
        ({"a": "b", "b": "a"}, "holds the link a to b, which leads in a circle"),
        ({"back": "."}, r"holds the link back to \., a folder that it lies in"),
        (
            {"one/two": "../three", "three/one": "../one"},
            "holds the link one/two/one to ../one, a folder that it lies in",
        ),
    ],
)
@pytest.mark.parametrize("image", [None, "own"])
def test_code_that_no_archive_can_hold(
    cloud: Cloud, script: Path, links: dict[str, str], said: str, image: str | None
) -> None:
    for link, target in links.items():
        (script / link).parent.mkdir(exist_ok=True)
        (script / link).symlink_to(target)
    given = {} if image else {"image_uri": None}
    with pytest.raises(ConfigError, match=rf"source_dir {script} {said}.* remove or correct it"):
        cloud.estimator(script, distribution=model_parallel(8, ddp=True), **given).fit(wait=False)


def test_code_that_cannot_be_read(cloud: Cloud, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusal is played."""
    (script / "secret").mkdir()
    listed = Path.iterdir

    def refuse(path: Path) -> Iterator[Path]:
        if path.name == "secret":
            raise PermissionError(13, "Permission denied", str(path))
        return iter(listed(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    made = cloud.estimator(script, distribution=model_parallel(8, ddp=True))  # a warning says it
    with pytest.raises(
        ConfigError, match=r"the folder secret, which cannot be read \(Permission denied\).* let this user"
    ):
        made.fit(wait=False)


def test_links_that_lead_somewhere_travel(cloud: Cloud, script: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "more.py").write_text("")
    (script / "shared").symlink_to(tmp_path / "shared")
    (script / "again").symlink_to("shared")
    cloud.estimator(script, distribution=model_parallel(8, ddp=True)).fit(wait=False)
    (script / "requirements.txt").mkdir()
    with pytest.raises(ConfigError, match=r"requirements\.txt is a folder, and .* rename it"):
        cloud.estimator(script, distribution=model_parallel(8, ddp=True)).fit(wait=False)


def test_a_missing_region_is_said_in_one_sentence(
    script: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from smp_estimator import SMPEstimator

    forget_account(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="no region of AWS is configured, and instance_type 'ml.p4d.24xlarge'"):
        SMPEstimator(
            entry_point="train.py",
            source_dir=str(script),
            role="role",
            image_uri="own",
            instance_type="ml.p4d.24xlarge",
            instance_count=1,
            distribution=model_parallel(8, ddp=True),
        )
