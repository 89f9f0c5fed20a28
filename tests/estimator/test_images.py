"""Which stock image a job gets, and what is said when there is none."""

from __future__ import annotations

import re

import pytest

from smp_config import ConfigError
from smp_estimator.cloud import images


def test_the_newest_is_the_default() -> None:
    version, python = images.choose_pytorch(None, None)
    assert images._number(version) >= (2, 6)
    assert python.startswith("py3")
    assert images.choose_pytorch(version, python) == (version, python)


@pytest.mark.parametrize("given", ["2.4", "2.4.0"])
def test_versions_are_filled_in(given: str) -> None:
    assert images.choose_pytorch(given, None) == (given, "py311")
    assert images.choose_pytorch(given, "py3") == (given, "py311")


@pytest.mark.parametrize("given", ["1.13.1", "2.3", "1.8"])
def test_below_the_floor(given: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"is {given}, but the runtime needs PyTorch 2\.4.*set framework_version='2\.4\.0', py_version='py311', the nearest",
    ):
        images.choose_pytorch(given, "py38")


def test_no_image_of_a_version() -> None:
    with pytest.raises(
        ConfigError, match=r"it has 2\.4\.0, 2\.5\.1.*set framework_version='2\.5\.1', or give image_uri"
    ):
        images.choose_pytorch("2.5.0", None)


def test_huggingface() -> None:
    transformers, torch, python = images.choose_huggingface(None, None, None)
    assert images._number(transformers) < (5,)
    assert images._number(torch) >= (2, 4)
    assert python.startswith("py3")
    assert images.choose_huggingface("4.49.0", None, None) == ("4.49.0", "2.5.1", "py311")
    assert images.choose_huggingface(None, "2.5.1", None)[1] == "2.5.1"
    assert images.choose_huggingface("4.49", "2.5", None)[1] == "2.5"
    with pytest.raises(ConfigError, match=r"transformers_version is 4\.28\.1.*with PyTorch 2\.4 or newer"):
        images.choose_huggingface("4.28.1", None, None)
    with pytest.raises(ConfigError, match=r"pytorch_version is 2\.0\.0, but the runtime needs"):
        images.choose_huggingface("4.28.1", "2.0.0", None)


def test_an_old_cell_hears_all_at_once() -> None:
    """What the message asks for is accepted, whichever of its ways is taken."""
    with pytest.raises(ConfigError) as caught:
        images.choose_huggingface("4.17", "1.10.2", "py38")
    fitting = dict(re.findall(r"(\w+_version)='([^']+)'", str(caught.value).split("These fit together: ")[1]))
    assert images.choose_huggingface(**fitting) == tuple(fitting.values())
    with pytest.raises(ConfigError) as caught:
        images.choose_pytorch("1.8.1", "py36")
    ways = re.findall(r"framework_version='([\d.]+)', py_version='(py\d+)'", str(caught.value))
    assert len(ways) == 2
    for way in ways:
        assert images.choose_pytorch(*way) == way


@pytest.mark.parametrize(
    ("uri", "stock"),
    [
        ("763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.4.0-gpu-py311", True),
        ("763104351884.dkr.ecr.cn-north-1.amazonaws.com.cn/huggingface-pytorch-training:2.5.1-x", True),
        ("123456789012.dkr.ecr.us-west-2.amazonaws.com/mine:1", False),
        ("pytorch-training:2.4", False),
        (None, False),
    ],
)
def test_stock_images_are_known_by_their_repository(uri: str | None, stock: bool) -> None:
    assert images.is_stock(uri) is stock
