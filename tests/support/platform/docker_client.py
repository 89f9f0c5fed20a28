"""Docker's client, and the containers of one test."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

IMAGE_VARIABLE = "SMP_TEST_IMAGE"
REGION = "us-east-1"
BUCKET = "smp-docker-tests"

#: Dummies, and easy to find where they should not be.
ACCESS_KEY, SECRET_KEY = "AKIADUMMYDUMMYDUMMY0", "dummy-secret-that-must-not-be-written-anywhere"

#: The network that local mode makes and leaves.
NETWORK = "sagemaker-local"


def docker(*words: str, check: bool = True) -> str:
    """Run the Docker client; gives its output without the last line break."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=180)
    if check and done.returncode:
        raise AssertionError(f"docker {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def logs(identity: str, *options: str) -> str:
    """All that a container has said, on both of its streams."""
    command = ["docker", "logs", *options, identity]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60).stdout


@dataclass
class Containers:
    """Containers and networks of one test, removed by id at its end."""

    folder: Path
    ids: list[str] = field(default_factory=list)
    networks: list[str] = field(default_factory=list)

    def collect(self) -> None:
        """Find the containers of local mode jobs below ``folder``, in the order of their hosts.

        By the names in their compose files; version 3 of the SDK gives them none, and Docker Compose marks them. While a job
        starts, a later host's may be found first: the order is right again when all are there.
        """
        found: list[str] = []
        for path in self.folder.glob("*/docker-compose.yaml"):
            for host, service in sorted(_services(path).items()):
                wanted = (
                    [f"name=^{service['container_name']}$"]
                    if "container_name" in service
                    else [
                        f"label=com.docker.compose.project.config_files={path}",
                        f"label=com.docker.compose.service={host}",
                    ]
                )
                found += docker("ps", "-aq", "--no-trunc", *(word for each in wanted for word in ("-f", each))).split()
        self.ids = [i for i in self.ids if i not in found] + found

    def run(self, *words: str) -> str:
        """Start a container in the background; gives its id."""
        identity = docker("run", "--detach", *words)
        self.ids.append(identity)
        return identity

    def exit_codes(self) -> list[int]:
        return [int(docker("inspect", "-f", "{{.State.ExitCode}}", i)) for i in self.ids]

    def remove(self) -> None:
        for identity in self.ids:
            docker("rm", "--force", "--volumes", identity, check=False)
        for identity in self.networks:
            docker("network", "rm", identity)


def _services(path: Path) -> dict[str, Any]:
    """Return the services of a compose file; none of one that the SDK is still writing."""
    try:
        written = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError:
        return {}
    return (written or {}).get("services") or {}
