"""What a machine or an account lacks for each way to run a job. Every outside question has a timeout."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smp_config.machine.extras import install_command
from smp_estimator.sdk.installed import EXTRAS, describe

#: The oldest PyTorch in which the runtime works.
OLDEST_TORCH = (2, 4)

#: Bytes of shared memory below which the data loaders of a few ranks fill it. Docker gives 64 MiB.
LEAST_SHARED = 1 << 30

#: Files that a process may have open; a rank needs some for each other rank, loader and log.
LEAST_FILES = 1024

#: Bytes for a job's trees, log and model.
LEAST_ROOM = 2 << 30

#: The memory that ranks of a host share.
SHARED = Path("/dev/shm")

#: Seconds that a command or an answer from the account may take.
TIMEOUT = 10


@dataclass(frozen=True)
class Finding:
    """One thing that a mode needs. ``ok`` is None when it could not be found out."""

    mode: str
    what: str
    ok: bool | None
    detail: str
    remedy: str = ""


#: Managed policies that the best practices name, each with actions that stand for it.
PERMISSIONS = {
    "AmazonSageMakerFullAccess": (
        "sagemaker:CreateTrainingJob",
        "sagemaker:DescribeTrainingJob",
        "sagemaker:StopTrainingJob",
    ),
    "AmazonS3FullAccess": ("s3:GetObject", "s3:PutObject", "s3:ListBucket"),
    "AmazonFSxFullAccess": ("fsx:DescribeFileSystems",),
    "AmazonEC2ContainerRegistryFullAccess": ("ecr:GetAuthorizationToken", "ecr:BatchGetImage", "ecr:PutImage"),
}


def _answer(*command: str) -> tuple[bool, str]:
    """Return whether a command succeeded, and the first line of its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return False, f"{command[0]} gave no answer in {TIMEOUT} s"
    except OSError as error:
        return False, f"{command[0]}: {error.strerror or error}"
    output = done.stdout.strip() or done.stderr.strip() or "no output"
    first_line = output.splitlines()[0]
    return done.returncode == 0, first_line[:200]


def _package(mode: str, name: str, distribution: str, remedy: str) -> Finding:
    """Check whether a package is installed, without importing it."""
    if importlib.util.find_spec(name) is None:
        return Finding(mode, name, False, f"not installed for {sys.executable}", remedy)
    try:
        return Finding(mode, name, True, importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return Finding(mode, name, True, "installed, version unknown")


def _sdk(mode: str, remedy: str) -> Finding:
    """Check which version of the SageMaker SDK is installed, and what it can be used for."""
    found = _package(mode, "sagemaker", "sagemaker", remedy)
    return replace(found, detail=describe()) if found.ok else found


def process_findings() -> list[Finding]:
    """Check the requirements of jobs that run as processes on this machine."""
    extra = f"{install_command('local')}, or {install_command('local3')} for version 3 of the SDK"
    beside = str(Path(sys.executable).parent)
    mpirun = shutil.which("mpirun", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    found = [*(_package("process", name, name, extra) for name in ("torch", "mpi4py")), _sdk("process", extra)]
    if mpirun is None:
        found.insert(0, Finding("process", "mpirun", False, "neither on PATH nor beside Python", extra))
    else:
        works, text = _answer(mpirun, "--version")
        found.insert(0, Finding("process", "mpirun", works, f"{text} ({mpirun})", "reinstall Open MPI"))
    try:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            ports = f"{one.getsockname()[1]} and {other.getsockname()[1]} on 127.0.0.1 could be opened"
        found.append(Finding("process", "free ports", True, ports))
    except OSError as error:
        found.append(Finding("process", "free ports", False, f"{error}", "allow listening on 127.0.0.1"))
    return found


def machine_findings() -> list[Finding]:
    """Check whether this machine has enough resources for jobs that run as processes."""
    return [*_torch_version(), _shared_memory(), _open_files(), _room()]


def _torch_version() -> list[Finding]:
    """Check whether PyTorch is new enough. Return an empty list if it is missing: another check reports that."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return []
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    least = ".".join(map(str, OLDEST_TORCH))
    remedy = f"pip install 'torch>={least}'"
    return [Finding("process", f"torch {least} or newer", numbers >= OLDEST_TORCH, version, remedy)]


def _shared_memory() -> Finding:
    remedy = "mount -o remount,size=4g /dev/shm, or in a container --shm-size 4g"
    if not SHARED.is_dir():
        return Finding("process", "shared memory", None, f"{SHARED} is not there", "Linux has it")
    size = shutil.disk_usage(SHARED)
    detail = f"{size.free / 1e9:.1f} of {size.total / 1e9:.1f} GB free in {SHARED}"
    return Finding("process", "shared memory", size.free >= LEAST_SHARED, detail, remedy)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = soft == resource.RLIM_INFINITY or soft >= LEAST_FILES
    more = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard}"
    return Finding(
        "process", "open files", is_enough, f"{soft} of at most {more} for a process", f"ulimit -n {LEAST_FILES}"
    )


def _room() -> Finding:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    remedy = "make room, or set TMPDIR to another disk"
    if not os.access(folder, os.W_OK):
        return Finding("process", "room for jobs", False, f"{folder} cannot be written to", remedy)
    return Finding("process", "room for jobs", free >= LEAST_ROOM, f"{free / 1e9:.1f} GB free in {folder}", remedy)


def docker_findings() -> list[Finding]:
    """Check the requirements of the SDK's local mode with images."""
    docker = shutil.which("docker")
    if docker is None:
        remedy = "install Docker, or use process mode"
        found = [Finding("docker", what, False, "docker is not on PATH", remedy) for what in ("docker", "daemon")]
    else:
        found = [Finding("docker", "docker", True, docker)]
        works, text = _answer(docker, "version", "--format", "{{.Server.Version}}")
        found.append(Finding("docker", "daemon", works, text, "start the Docker daemon, and join its group"))
    works, text = _answer(docker, "compose", "version") if docker else (False, "docker is not on PATH")
    if not works and shutil.which("docker-compose"):
        works, text = _answer("docker-compose", "--version")
    found.append(Finding("docker", "compose", works, text, "install the compose plugin or docker-compose"))
    return found


def cloud_findings(role: str | None = None, session: Any = None) -> list[Finding]:
    """Check the requirements of training in an AWS account, with short timeouts and without retries."""
    if importlib.util.find_spec("boto3") is None:
        return [Finding("cloud", "boto3", False, "not installed", install_command(EXTRAS[2]))]
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    found = [_sdk("cloud", f"{install_command(EXTRAS[2])}, or {install_command(EXTRAS[3])} for version 3")]
    try:
        session = session or boto3.Session()
        credentials, region = session.get_credentials(), session.region_name
    except BotoCoreError as error:  # a profile that does not exist, a broken configuration file
        return [*found, Finding("cloud", "credentials", False, str(error), "correct the AWS configuration")]
    remedy = "set AWS_DEFAULT_REGION, or run aws configure"
    found.append(Finding("cloud", "region", bool(region), region or "none", remedy))
    if credentials is None:
        return [*found, Finding("cloud", "credentials", False, "none found", "run aws configure, or assume a role")]
    quick = Config(connect_timeout=TIMEOUT / 2, read_timeout=TIMEOUT, retries={"max_attempts": 1, "mode": "standard"})
    where = {"region_name": region or "us-east-1", "config": quick}
    try:
        caller = session.client("sts", **where).get_caller_identity()["Arn"]
    except (BotoCoreError, ClientError) as error:
        return [*found, Finding("cloud", "credentials", False, f"refused or no answer: {error}", "renew them")]
    found.append(Finding("cloud", "credentials", True, caller))
    return found + _permissions(session.client("iam", **where), role or _principal(caller))


def _principal(arn: str) -> str:
    """Return the ARN of the role behind an assumed-role session; other principals are returned unchanged.

    If the role has a path, the ARN of the session does not contain it.
    """
    kind, _, rest = arn.partition(":assumed-role/")
    return f"{kind.replace(':sts:', ':iam:')}:role/{rest.split('/')[0]}" if rest else arn


def _permissions(iam: Any, principal: str) -> list[Finding]:
    from botocore.exceptions import BotoCoreError, ClientError

    actions = [action for group in PERMISSIONS.values() for action in group]
    try:
        answer = iam.simulate_principal_policy(PolicySourceArn=principal, ActionNames=actions, MaxItems=100)
    except (BotoCoreError, ClientError) as error:
        detail = f"the account does not say ({error})"
        remedy = "allow iam:SimulatePrincipalPolicy, give --role, or look at the policies in the console"
        return [Finding("cloud", policy, None, detail, remedy) for policy in PERMISSIONS]
    allowed = {r["EvalActionName"].lower() for r in answer["EvaluationResults"] if r["EvalDecision"] == "allowed"}
    found = []
    for policy, group in PERMISSIONS.items():
        lacking = [action for action in group if action.lower() not in allowed]
        detail = f"{principal} may not {', '.join(lacking)}" if lacking else f"{principal}: {', '.join(group)}"
        found.append(Finding("cloud", policy, not lacking, detail, f"attach {policy}, or a narrower policy"))
    return found
