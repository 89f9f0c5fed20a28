"""The start of a job on this machine, from a request in the service's format, for either SDK."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from smp_config import ConfigError, JobSettings
from smp_config.machine.disk_space import full_disk, no_more_files, note_room
from smp_estimator.local.files.channels import read_channels
from smp_estimator.local.files.tree import CHECKPOINTS_IN_CONTAINER, JobTree
from smp_estimator.local.files.uris import is_file_uri, path_of, require_address
from smp_estimator.local.job import JobSession, ProcessJob
from smp_launch.errors import LaunchError

if TYPE_CHECKING:
    from smp_estimator.local.files.code import CodeSource

logger = logging.getLogger(__name__)

#: The jobs that this interpreter has started, by name, whichever session started them.
STARTED: dict[str, ProcessJob] = {}

#: Names that the service accepts.
_JOB_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")

#: Errors of making a folder without permission, on a read-only disk, or below a file.
_NOT_WRITABLE = frozenset((errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP))

#: Parts of a request that only the service can honour.
_IGNORED = {
    "DebugHookConfig": "debugger hooks",
    "DebugRuleConfigurations": "debugger rules",
    "TensorBoardOutputConfig": "TensorBoard output",
    "ProfilerRuleConfigurations": "profiler rules",
    "ExperimentConfig": "experiments",
    "VpcConfig": "the VPC",
    "RetryStrategy": "retries",
}


def check_job_name(name: str) -> None:
    """Raise ConfigError, with the rule, for a name that the service refuses."""
    if not _JOB_NAME.fullmatch(name):
        raise ConfigError(
            f"the job name {name!r} ({len(name)} characters) is not one that the service accepts; it comes from "
            "job_name= or base_job_name=: use at most 63 letters, digits and single hyphens, beginning with a letter "
            "or digit",
            code="SMP115",
        )


class StartingSession(JobSession, Protocol):
    """The part of a session that starting a job needs."""

    root: Path | None

    @property
    def s3_resource(self) -> Any:
        """Return boto3's resource, for code and channels in S3."""

    def download(self, uri: str, folder: Path) -> None:
        """Fetch the contents of an ``s3://`` prefix into an empty folder."""


def start_job(request: Mapping[str, Any], session: StartingSession, source: CodeSource | None = None) -> ProcessJob:
    """Check a request, build the job's folders and start its processes; return while they run.

    Args:
        request: of ``CreateTrainingJob``.
        source: what the job runs; without it the ``file://`` submit directory among the hyperparameters is linked.

    Raises:
        ConfigError: before any process is started.
        LaunchError: there is no room for the job's folders; nothing is left of them.
    """
    name, resources = request["TrainingJobName"], request["ResourceConfig"]
    _require_free_name(name)
    hosts = _host_count(resources)
    channels = read_channels(request.get("InputDataConfig"), request["AlgorithmSpecification"].get("TrainingInputMode"))
    checkpoints = _checkpoints(request.get("CheckpointConfig"))
    hyperparameters = {str(k): str(v) for k, v in (request.get("HyperParameters") or {}).items()}
    # An SDK estimator may have sent these without our checks. Refuse unreadable ones here, as the service would.
    JobSettings.from_hyperparameters(hyperparameters)
    output_path = request["OutputDataConfig"].get("S3OutputPath") or ""
    if output_path:
        require_address(output_path, "output_path")
    _warn_of_ignored(request)
    with _naming_full_disk(session.root or Path(tempfile.gettempdir())):
        tree = JobTree.at(_new_root(name, session.root), hosts)
        try:
            job = ProcessJob(
                name, tree, request, session=session, destination=output_path or f"file://{tree.artifacts}"
            )
        except BaseException as error:  # also Ctrl-C: no one knows of the folder yet
            note_room(error, tree.root)
            shutil.rmtree(tree.root, ignore_errors=True)
            raise
        try:
            if source is not None:
                source.copy_to(tree.code, session)
            else:
                _link_submitted(tree.code, hyperparameters)
            for file in ("setup.py", "requirements.txt"):
                if (tree.code / file).is_file():
                    logger.warning("%s is not installed: the job uses the packages of this environment", file)
            tree.build(
                hyperparameters=hyperparameters,
                channels=channels,
                instance_type=str(resources.get("InstanceType") or "local"),
                checkpoints=checkpoints,
                session=session,
            )
            job.start()
        except BaseException as error:  # also Ctrl-C: no caller has the job yet, to end it
            note_room(error, tree.root)
            job.discard()
            raise
    STARTED[name] = job
    return job


@contextlib.contextmanager
def _naming_full_disk(root: Path) -> Iterator[None]:
    """Run the block; turn errors about missing disk space or permissions into errors that name the folder."""
    try:
        yield
    except OSError as error:
        path = Path(error.filename) if isinstance(error.filename, str) else root
        if (why := no_more_files(error)) is not None:
            raise LaunchError(f"the job cannot start: {why}", code="SMP115") from error
        if error.errno in _NOT_WRITABLE and path.is_relative_to(root.parent):
            raise LaunchError(
                f"{path} cannot be made ({error.strerror}); every job gets folders with a copy of its code, in {root}: give a "
                "folder that can be written to with ProcessSession(root=…) or ModelTrainer(local_container_root=…)",
                code="SMP115",
            ) from error
        if (said := full_disk(error, path)) is None:
            raise
        raise LaunchError(
            f"{said}; every job gets folders with a copy of its code, in {root}: make room there, or have them on a larger disk "
            "with ProcessSession(root=…) or ModelTrainer(local_container_root=…)",
            code="SMP115",
        ) from error


def _require_free_name(name: str) -> None:
    check_job_name(name)
    if name in STARTED:
        raise ConfigError(
            f"a job named {name!r} exists already ({STARTED[name].status.value}); names are used once: leave job_name "
            "out, or give another one",
            code="SMP115",
        )


def _new_root(name: str, root: Path | None) -> Path:
    if root is None:
        return Path(tempfile.mkdtemp(prefix=f"{name}-"))
    try:
        root.mkdir(parents=True, exist_ok=True)
        # Code, hyperparameters and log are private to this user, whatever this process's umask allows.
        (root / name).mkdir(mode=0o700)
    except FileExistsError:
        raise ConfigError(
            f"{root / name} exists already, left by an earlier job of this name; the jobs' folders lie in {root}: leave "
            "job_name out, or give another one",
            code="SMP115",
        ) from None
    return root / name


def _warn_of_ignored(request: Mapping[str, Any]) -> None:
    for key, words in _IGNORED.items():
        if request.get(key):
            logger.warning("left out, since a job on this machine has no such thing: %s", words)
    # These two are part of the image's description.
    algorithm = request["AlgorithmSpecification"]
    for key in ("ContainerEntrypoint", "ContainerArguments"):
        if algorithm.get(key):
            logger.warning("%s has no meaning without a container and is left out", key)


def _host_count(resources: Mapping[str, Any]) -> int:
    if resources.get("InstanceGroups"):
        raise ConfigError(
            f"the job asks for {len(resources['InstanceGroups'])} instance groups, but all hosts simulated on this machine are "
            "alike; use instance_type='local' and instance_count",
            code="SMP115",
        )
    return int(resources["InstanceCount"])


def _checkpoints(config: Mapping[str, str] | None) -> Path | None:
    """Return the directory that keeps the checkpoints across jobs; None if the job has no checkpoint settings.

    Raises:
        ConfigError: the settings have no equivalent on this machine.
    """
    if not config:
        return None
    uri = require_address(config["S3Uri"], "checkpoint_s3_uri")
    if not is_file_uri(uri):
        raise ConfigError(
            f"checkpoint_s3_uri is {uri!r}, but nothing copies the checkpoints of a job on this machine to S3 while it runs; "
            "give a local directory, for example 'file:///home/me/checkpoints'",
            code="SMP115",
        )
    local = config.get("LocalPath") or CHECKPOINTS_IN_CONTAINER
    if local.rstrip("/") != CHECKPOINTS_IN_CONTAINER:
        raise ConfigError(
            f"checkpoint_local_path is {local!r}, but a job on this machine keeps its checkpoints in its own "
            f"{CHECKPOINTS_IN_CONTAINER} only; leave checkpoint_local_path out",
            code="SMP115",
        )
    path = path_of(uri)
    if path.exists() and not path.is_dir():
        raise ConfigError(
            f"checkpoint_s3_uri is {uri!r}, and {path} is a file; checkpoints need a directory: give another path",
            code="SMP115",
        )
    return path


def _link_submitted(target: Path, hyperparameters: Mapping[str, str]) -> None:
    """Link the job's code to the ``file://`` directory that an estimator of the SDK itself submits."""
    uri = hyperparameters.get("sagemaker_submit_directory", "").strip('"')
    if not is_file_uri(uri):
        raise ConfigError(
            f"the job's code lies at {uri or 'no address'}, but a job on this machine runs code from a file:// directory; "
            "use SMPEstimator, or turn local.local_code on in the session's config",
            code="SMP115",
        )
    target.symlink_to(path_of(uri), target_is_directory=True)
