"""The user's requirements.txt with the runtime's: what pip would refuse on the cluster is refused here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from smp_config import ConfigError
from smp_estimator.cloud import image_table
from smp_estimator.cloud.requirements import combine_requirements

OURS = ["click>=8.1", "pydantic>=2.7", "rich>=13", "safetensors"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_encodings_that_pip_reads(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text("six  # é\n", encoding=encoding)
    assert combine_requirements(path, OURS).splitlines() == [
        "six  # é",
        "",
        "# what the model parallel runtime needs",
        *OURS,
    ]


def test_without_a_file(tmp_path: Path) -> None:
    assert combine_requirements(tmp_path / "requirements.txt", OURS).splitlines()[1:] == OURS


@pytest.mark.parametrize(
    "line",
    [
        "pydantic",
        "pydantic==2.*",
        "Pydantic>=2,<3",
        "pydantic==2.12.0",
        "pydantic~=2.8",
        "pydantic>2.6,<2.8",
        "click<9",
        "click!=8.1",
        "click==8.1",
        "click<8; python_version<'3'",
        "# click<8",
        "click @ https://example.com/click.whl",
        "--extra-index-url https://example.com/simple",
        "./local_package",
        "-e .",
        "-r missing.txt",
        "safetensors==0.0.1",
    ],
)
def test_what_agrees(tmp_path: Path, line: str) -> None:
    (tmp_path / "requirements.txt").write_text(line)
    assert combine_requirements(tmp_path / "requirements.txt", OURS).startswith(line)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "pydantic==1.*",
            r"has 'pydantic==1\.\*', and the runtime needs pydantic>=2\.7; no version of pydantic is both",
        ),
        ("pydantic==2.6.4", "no version of pydantic"),
        ("click<8", "no version of click"),
        ("click <8.1", "no version of click"),
        ("rich~=12.0  # pinned", "allow rich>=13, or give image_uri"),
        ("six==1 --hash=sha256:00", "wants hashes of everything"),
        ("six==1 \\\n    --hash sha256:00", "remove the hashes"),
        ("--require-hashes", "remove the hashes"),
        ("-r more.txt", r"more\.txt has 'click<8'"),
        ("-cmore.txt", r"more\.txt has 'click<8'"),
    ],
)
def test_what_contradicts(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "more.txt").write_text("-r requirements.txt\nclick<8\n")
    (tmp_path / "requirements.txt").write_text(line)
    with pytest.raises(ConfigError, match=said):
        combine_requirements(tmp_path / "requirements.txt", OURS)


def test_no_text(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ConfigError, match="is not UTF-8 text .* save it as UTF-8"):
        combine_requirements(tmp_path / "requirements.txt", OURS)


def image(torch: str, python: str | None = None) -> image_table.TrainingImage:
    return dataclasses.replace(image_table.images()[0], torch=torch, python=python)


@pytest.mark.parametrize(
    "line",
    [
        "torch",
        "torch==2.8.0",
        "torch>=2.6",
        "torch~=2.8",
        "torchvision==0.23.0",
        "torchaudio==2.8.0",
        "numpy<2",
        "numpy>=1.26.4",
    ]
    + ["torch==1.13.1; python_version<'3.9'", "torchmetrics==1.0", "torchvision"],
)
def test_what_fits_the_image(tmp_path: Path, line: str) -> None:
    (tmp_path / "requirements.txt").write_text(line)
    assert combine_requirements(tmp_path / "requirements.txt", OURS, image("2.8.0", "py312"))
    assert combine_requirements(tmp_path / "requirements.txt", OURS)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torch==1.13.1", r"has 'torch==1\.13\.1', and the image has PyTorch 2\.8\.0; pip would put another build"),
        ("torch<2", "remove the line"),
        ("torch==2.7.1", "and the image has PyTorch 2"),
        ("Torch>2.8.99", "and the image has PyTorch 2"),
        ("torchvision==0.14.1", "and the image has PyTorch 2"),
        ("torchvision~=0.22.0", "and the image has PyTorch 2"),
        ("torchaudio<2.8", "and the image has PyTorch 2"),
        ("-r more.txt", r"more\.txt has 'torch<2'"),
        ("numpy<1.20", r"NumPy before 1\.26\.0 has no wheel for the image's Python.* allow numpy>=1\.26\.0"),
        ("numpy==1.24.4", "no wheel for the image's Python"),
    ],
)
def test_what_does_not_fit_the_image(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "more.txt").write_text("torch<2\n")
    (tmp_path / "requirements.txt").write_text(line)
    with pytest.raises(ConfigError, match=said):
        combine_requirements(tmp_path / "requirements.txt", OURS, image("2.8.0", "py312"))


@pytest.mark.parametrize("line", ["torch==1.13.1", "torch<2.4", "torchvision<0.15", "numpy<1.20"])
def test_what_fits_no_image(tmp_path: Path, line: str) -> None:
    (tmp_path / "requirements.txt").write_text(line)
    with pytest.raises(ConfigError, match=r"PyTorch 2\.4 or newer|NumPy before 1\.21\.3"):
        combine_requirements(tmp_path / "requirements.txt", OURS)
