"""Which stock image a job gets, and what is said when there is none, or none that is patched."""

from __future__ import annotations

import re
from datetime import date
from typing import Any

import pytest
from support.platform.stock_images import DAY

from smp_config import ConfigError
from smp_estimator.cloud import image_choice, image_table, images
from smp_estimator.cloud.image_choice import choose_huggingface, choose_pytorch
from smp_estimator.sdk.functions import config_for_framework

ACCOUNT = "763104351884.dkr.ecr.us-west-2.amazonaws.com"

#: Days on which the newest image that is patched is another one.
EARLY, LATE, LAST = date(2026, 8, 6), DAY, date(2027, 10, 22)

OF_SDK = config_for_framework("pytorch")["training"]["versions"]


def versions(given: str | None, python: str | None = None, **wanted: Any) -> tuple[str, str]:
    made = choose_pytorch(given, python, **wanted)
    return made.framework_version, made.py_version


def test_the_default_is_the_newest_of_the_sdk_that_is_patched() -> None:
    newest = max(OF_SDK, key=images.version_numbers)
    assert versions(None, day=EARLY) == (newest, OF_SDK[newest]["py_versions"][-1])
    assert choose_pytorch(None, None, day=EARLY).image.by_name


@pytest.mark.parametrize(
    ("day", "given", "version"),
    [
        (EARLY, {}, "2.8.0"),
        (date(2026, 8, 7), {}, "2.14"),
        (LATE, {}, "2.14"),
        (LATE, {"region": "us-west-2"}, "2.14"),
        (LATE, {"region": "cn-north-1"}, "2.13.0"),
        (LATE, {"gpus": ["V100"]}, "2.8.0"),
        (LATE, {"gpus": ["A100", "V100"]}, "2.8.0"),
        (LATE, {"gpus": ["A100"]}, "2.14"),
        (date(2027, 7, 21), {"region": "cn-north-1"}, "2.8.0"),
        (LAST, {}, "2.8.0"),
        (LATE, {"by_name": True}, "2.8.0"),
    ],
)
def test_what_is_patched_on_a_day(
    day: date, given: dict[str, Any], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an SDK that knows images up to 2.8; none of the table is patched on the last day, and the SDK's newest is taken."""
    known = {name: row for name, row in OF_SDK.items() if images.version_numbers(name) <= (2, 8, 0)}
    told = {"pytorch": {"training": {"versions": known, "version_aliases": {"2.8": "2.8.0"}}}}
    monkeypatch.setattr(image_choice, "config_for_framework", lambda name: _found(told, name))
    assert choose_pytorch(None, None, day=day, **given).framework_version == version


def _found(told: dict[str, Any], name: str) -> Any:
    if name not in told:
        raise FileNotFoundError(name)
    return told[name]


#: An SDK that knows the newer repository, and one image more than the table.
NEWER = {
    "training": {
        "processors": ["cpu", "gpu"],
        "versions": {
            version: {
                "container_version": {"cpu": "cpu-amzn2023-sagemaker", "gpu": "cu140-amzn2023-sagemaker"},
                "registries": {"us-west-2": "763104351884"},
                "repository": "pytorch",
                "tag_prefix": version,
            }
            for version in ("2.13", "2.99")
        },
    }
}


@pytest.mark.parametrize(
    ("region", "instance_type", "version", "name"),
    [
        ("us-west-2", "ml.p4d.24xlarge", "2.99", "pytorch:2.99-cu140-amzn2023-sagemaker"),
        ("us-west-2", "ml.c5.18xlarge", "2.99", "pytorch:2.99-cpu-amzn2023-sagemaker"),
        ("eu-west-1", "ml.p4d.24xlarge", "2.14", "pytorch:2.14-cu133-amzn2023-sagemaker"),
    ],
)
def test_an_sdk_that_knows_more_than_the_table(
    region: str, instance_type: str, version: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"pytorch": config_for_framework("pytorch"), "pytorch-amzn2023": NEWER}
    monkeypatch.setattr(image_choice, "config_for_framework", lambda asked: _found(told, asked))
    chosen = choose_pytorch(None, None, day=DAY, region=region)
    assert (chosen.framework_version, chosen.image.of_sdk) == (version, version == "2.99")
    assert chosen.address(region, instance_type) == f"763104351884.dkr.ecr.{region}.amazonaws.com/{name}"
    assert choose_pytorch("2.13", None).image.of_sdk


@pytest.mark.parametrize(
    ("region", "registry"),
    [
        ("us-east-1", "763104351884.dkr.ecr.us-east-1.amazonaws.com"),
        ("cn-north-1", "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn"),
        ("eu-south-2", "503227376785.dkr.ecr.eu-south-2.amazonaws.com"),
    ],
)
def test_the_address_is_formed_from_what_the_sdk_knows_of_a_region(region: str, registry: str) -> None:
    chosen = choose_pytorch("2.13", None)
    assert chosen.address(region, "ml.g5.xlarge") == f"{registry}/pytorch:2.13-cu133-amzn2023-sagemaker"
    assert chosen.address(region, "ml.c5.xlarge") == f"{registry}/pytorch:2.13-cpu-amzn2023-sagemaker"
    assert choose_pytorch("2.8", None).address(region, "ml.c5.xlarge") == f"{registry}/pytorch-training:2.8-cpu-py312"


@pytest.mark.parametrize("given", ["2.4", "2.4.0"])
def test_versions_are_filled_in(given: str) -> None:
    assert versions(given) == (given, "py311")
    assert versions(given, "py3") == (given, "py311")


def test_versions_that_only_the_table_has() -> None:
    assert versions("2.12") == ("2.12", "py312")
    assert versions("2.12.1", "py312") == ("2.12.1", "py312")
    assert versions("2.14", "py314") == ("2.14", "py314"), "its Python is not known, nor is it part of the address"
    with pytest.raises(ConfigError, match=r"py_version is py310, but the image of framework_version 2\.13 has py312"):
        versions("2.13", "py310")


@pytest.mark.parametrize("given", ["1.13.1", "2.3", "1.8"])
def test_below_the_floor(given: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"is {given}, but the runtime needs PyTorch 2\.4.*set framework_version='2\.4\.0', py_version='py311', the nearest",
    ):
        versions(given, "py38")


def test_no_image_of_a_version() -> None:
    with pytest.raises(
        ConfigError, match=r"known are 2\.4\.0, 2\.5\.1.*, 2\.14: set framework_version='2\.5\.1', or give image_uri"
    ):
        versions("2.5.0")


def test_huggingface() -> None:
    transformers, torch, python = choose_huggingface(None, None, None)
    assert images.version_numbers(transformers) < (5,)
    assert images.version_numbers(torch) >= (2, 4)
    assert python.startswith("py3")
    assert choose_huggingface("4.49.0", None, None) == ("4.49.0", "2.5.1", "py311")
    assert choose_huggingface(None, "2.5.1", None)[1] == "2.5.1"
    assert choose_huggingface("4.49", "2.5", None)[1] == "2.5"
    with pytest.raises(ConfigError, match=r"transformers_version is 4\.28\.1.*with PyTorch 2\.4 or newer"):
        choose_huggingface("4.28.1", None, None)
    with pytest.raises(ConfigError, match=r"pytorch_version is 2\.0\.0, but the runtime needs"):
        choose_huggingface("4.28.1", "2.0.0", None)


def test_an_old_cell_hears_all_at_once() -> None:
    """What the message asks for is accepted, whichever of its ways is taken."""
    with pytest.raises(ConfigError) as caught:
        choose_huggingface("4.17", "1.10.2", "py38")
    fitting = dict(re.findall(r"(\w+_version)='([^']+)'", str(caught.value).split("These fit together: ")[1]))
    assert choose_huggingface(**fitting) == tuple(fitting.values())
    with pytest.raises(ConfigError) as caught:
        versions("1.8.1", "py36")
    ways = re.findall(r"framework_version='([\d.]+)'(?:, py_version='(py\d+)')?", str(caught.value))
    assert len(ways) == 2
    for version, python in ways:
        assert versions(version, python or "py36")[0] == version


@pytest.mark.parametrize(
    ("uri", "stock"),
    [
        (f"{ACCOUNT}/pytorch-training:2.4.0-gpu-py311", True),
        ("763104351884.dkr.ecr.cn-north-1.amazonaws.com.cn/huggingface-pytorch-training:2.5.1-x", True),
        (f"{ACCOUNT}/pytorch:2.13-cu133-amzn2023-sagemaker", True),
        (f"{ACCOUNT}/pytorch:2.13.0-cpu-amzn2023-sagemaker-v1.2", True),
        (f"{ACCOUNT}/pytorch@sha256:0123", True),
        ("public.ecr.aws/deep-learning-containers/pytorch:2.12-cu130-amzn2023-sagemaker", True),
        ("123456789012.dkr.ecr.us-west-2.amazonaws.com/pytorch:2.13-cu133-amzn2023-sagemaker", True),
        ("123456789012.dkr.ecr.us-west-2.amazonaws.com/pytorch:2.13-mine", False),
        ("123456789012.dkr.ecr.us-west-2.amazonaws.com/pytorch@sha256:0123", False),
        (f"{ACCOUNT}/pytorch-inference:2.6.0-gpu-py312", False),
        (f"{ACCOUNT}/djl/pytorch:2.13-cu133-amzn2023-sagemaker", False),
        ("123456789012.dkr.ecr.us-west-2.amazonaws.com/mine:1", False),
        ("pytorch-training:2.4", False),
        ("public.ecr.aws/somebody/pytorch-training:2.4", False),
        (None, False),
    ],
)
def test_stock_images_are_known_by_their_repository(uri: str | None, stock: bool) -> None:
    assert images.is_stock(uri) is stock


@pytest.mark.parametrize(
    ("name", "day", "gpu", "said"),
    [
        ("pytorch-training:2.8.0-gpu-py312", date(2026, 8, 6), "A100", None),
        (
            "pytorch-training:2.8.0-gpu-py312",
            date(2026, 8, 7),
            "A100",
            r"PyTorch 2\.8\.0 \(pytorch-training\) were patched until 2026-08-06, .*leave image_uri out, or name a newer one; "
            r"pytorch:2\.14-cu133-amzn2023-sagemaker is patched until 2027-10-21 at the latest",
        ),
        (
            "pytorch-training:2.8.0-gpu-py312",
            DAY,
            "V100",
            r"no stock image with code for V100 GPUs .* is still patched",
        ),
        ("pytorch:2.14-cu133-amzn2023-sagemaker", date(2027, 10, 21), None, None),
        (
            "pytorch:2.14-cu133-amzn2023-sagemaker",
            LAST,
            None,
            r"until 2027-10-21 at the latest.*no stock image that is known",
        ),
        (
            "huggingface-pytorch-training:2.8.0-transformers4.56.2-gpu-py312-cu129-ubuntu22.04",
            DAY,
            "A100",
            r"Transformers 4\.56\.2 and PyTorch 2\.8\.0 .*no Hugging Face image .* is still patched; name another one by "
            r"image_uri, such as pytorch:2\.14",
        ),
    ],
)
def test_what_is_said_when_patches_have_ended(name: str, day: date, gpu: str | None, said: str | None) -> None:
    row = image_table.row_of(name)
    assert row is not None
    found = images.patches_ended(row, day, "image_uri", gpu)
    if said is None:
        assert found is None
    else:
        assert re.search(said, found or ""), found


def test_what_is_said_of_a_default() -> None:
    row = image_table.rows_of("2.8")["gpu"]
    assert ": name a newer one by image_uri; " in (images.patches_ended(row, DAY) or "")


@pytest.mark.parametrize(
    ("image", "lacks"),
    [
        (f"{ACCOUNT}/pytorch-training:2.8.0-gpu-py312", False),
        (f"{ACCOUNT}/pytorch-training:2.10.0-gpu-py313", True),
        (f"{ACCOUNT}/pytorch:2.99-cu140-amzn2023-sagemaker", True),
        ("mine:1", False),
        (None, False),
    ],
)
def test_code_for_v100(image: str | None, lacks: bool) -> None:
    assert (images.lacks_code_for(image, "V100") is not None) is lacks
    assert images.lacks_code_for(image, "A100") is None


@pytest.mark.parametrize(
    ("uri", "lacks"),
    [
        (f"{ACCOUNT}/pytorch:2.13-cu133-amzn2023", True),
        (f"{ACCOUNT}/pytorch:2.13-cu133-amzn2023-sagemaker", False),
        (f"{ACCOUNT}/pytorch-training:2.9.0-gpu-py312-cu130-ubuntu22.04-ec2", True),
        (f"{ACCOUNT}/pytorch-training:2.9.0-gpu-py312", False),
        ("mine:1-ec2", False),
    ],
)
def test_images_without_the_toolkit(uri: str, lacks: bool) -> None:
    assert (images.lacks_toolkit(uri) is not None) is lacks


@pytest.mark.parametrize(
    ("uri", "floor", "refused"),
    [
        (f"{ACCOUNT}/pytorch-training:2.3.0-gpu-py311", images.TORCH_FLOOR, True),
        (f"{ACCOUNT}/pytorch-training:2.4.0-gpu-py311", images.TORCH_FLOOR, False),
        (f"{ACCOUNT}/pytorch-training:2.4.0-gpu-py311", images.DATA_PARALLEL_FLOOR, True),
        (f"{ACCOUNT}/huggingface-pytorch-training:2.1.0-transformers4.36.0-gpu-py310", images.TORCH_FLOOR, True),
        (f"{ACCOUNT}/pytorch:2.13-cu133-amzn2023-sagemaker", images.DATA_PARALLEL_FLOOR, False),
        (f"{ACCOUNT}/pytorch-training@sha256:1234", images.TORCH_FLOOR, False),
        (f"{ACCOUNT}/pytorch-training:latest", images.TORCH_FLOOR, False),
        ("123456789012.dkr.ecr.us-west-2.amazonaws.com/mine:1.13", images.TORCH_FLOOR, False),
        (None, images.TORCH_FLOOR, False),
    ],
)
def test_stock_images_that_are_too_old(uri: str | None, floor: tuple[int, int], refused: bool) -> None:
    if not refused:
        images.check_stock_version(uri, floor)
        return
    with pytest.raises(
        ConfigError, match=r"a stock image with PyTorch 2\..*leave image_uri out, or name a newer one, such as"
    ):
        images.check_stock_version(uri, floor)
