"""The user's requirements.txt with the runtime's: what pip would refuse on the cluster is refused here."""

from __future__ import annotations

from pathlib import Path

import pytest

from smp_config import ConfigError
from smp_estimator.cloud.requirements import combined

OURS = ["click>=8.1", "pydantic>=2.7", "rich>=13", "safetensors"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_encodings_that_pip_reads(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text("six  # é\n", encoding=encoding)
    assert combined(path, OURS).splitlines() == ["six  # é", "", "# what the model parallel runtime needs", *OURS]


def test_without_a_file(tmp_path: Path) -> None:
    assert combined(tmp_path / "requirements.txt", OURS).splitlines()[1:] == OURS


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
    assert combined(tmp_path / "requirements.txt", OURS).startswith(line)


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
        combined(tmp_path / "requirements.txt", OURS)


def test_no_text(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ConfigError, match="is not UTF-8 text .* save it as UTF-8"):
        combined(tmp_path / "requirements.txt", OURS)
