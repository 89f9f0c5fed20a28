"""Manifests for the training operator of SageMaker HyperPod: a `HyperPodPyTorchJob` whose pods run `smp-launch`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smp_config import ConfigError, ModelParallelParameters
from smp_config.machine.instances import instance
from smp_config.machine.launchers import SECRET_VARIABLE
from smp_config.version2.parameters import Version2Parameters
from smp_config.version2.which_version import choose_version
from smp_records.records import PACE_PREFIX, USAGE_PREFIX
from smp_records.tracking import RECORDS_VARIABLE

#: Names of objects in Kubernetes, which become names of hosts.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")

#: Seconds for which ranks may save after SIGTERM; the pod has a little more.
GRACE_SECONDS = 110
_POD_GRACE_SECONDS = 120

#: Seconds between two lines of a rank by which the operator sees that the job goes on.
_RECORD_SECONDS = 30

#: The period over which the operator counts restarts, in seconds.
_RESTART_PERIOD_SECONDS = 86400

#: Volume of a pod's shared memory, which loaders and gloo use. The default of containers, 64 MiB, is too small.
_SHARED_MEMORY = "shared-memory"


@dataclass(frozen=True)
class HyperPodJob:
    """A job for the training operator of HyperPod.

    Attributes:
        name: of the job; lower-case letters, digits and hyphens.
        image: with this package, the script and `hyperpod-elastic-agent`.
        script: its path in the image.
        words: the script's own command line.
        nodes: pods, one on each node.
        processes: ranks of each node.
        parameters: of the model parallel library.
        instance_type: of the nodes; None for any.
        environment: variables of every rank.
        volumes: claim of a persistent volume → where it is mounted.
        secret: a Secret of Kubernetes, whose key `secret` the ranks know each other by; None for no secret.
        namespace: where the job runs; None for the default one.
        restarts: how often the operator starts the job again after a failure or a hang.
        start_seconds: time until the first update, after which the job hangs.
        hang_seconds: time between two updates, after which the job hangs.
    """

    name: str
    image: str
    script: str
    words: Sequence[str] = ()
    nodes: int = 1
    processes: int = 1
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"ddp": True})
    instance_type: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    volumes: Mapping[str, str] = field(default_factory=dict)
    secret: str | None = None
    namespace: str | None = None
    restarts: int = 3
    start_seconds: int = 3600
    hang_seconds: int = 900

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: a name is none of Kubernetes, the degrees do not fit the processes, or the nodes have fewer GPUs.
        """
        names = {"name": self.name, "namespace": self.namespace, "secret": self.secret}
        for what, name in [*names.items(), *(("volume", claim) for claim in self.volumes)]:
            if name is not None and not _NAME.fullmatch(name):
                raise ConfigError(
                    f"{what} is {name!r}; Kubernetes takes up to 63 lower-case letters, digits and hyphens, with a letter or digit "
                    "at both ends",
                    code="SMP108",
                )
        for claim, path in self.volumes.items():
            if not path.startswith("/"):
                raise ConfigError(
                    f"volume {claim} is mounted at {path!r}; write an absolute path: {claim}=/data", code="SMP108"
                )
        if _SHARED_MEMORY in self.volumes:
            raise ConfigError(
                f"volume {_SHARED_MEMORY} is the name of the pods' shared memory: give the claim another name",
                code="SMP108",
            )
        if RECORDS_VARIABLE in self.environment:
            raise ConfigError(
                f"environment sets {RECORDS_VARIABLE}, whose lines the operator looks for: leave it out, or change hang_seconds",
                code="SMP108",
            )
        known = instance(self.instance_type) if self.instance_type else None
        if known is not None and self.processes > max(1, known.gpus):
            raise ConfigError(
                f"processes is {self.processes}, but {self.instance_type} has {known.gpus} GPUs: use at most one process for each",
                code="SMP108",
            )
        of_2 = choose_version(self.parameters, self.script).is_2  # the script may be on this machine, too
        kind = Version2Parameters.from_parameters if of_2 else ModelParallelParameters.from_mp_parameters
        kind(dict(self.parameters)).topology(self.nodes * self.processes)

    def manifest(self) -> dict[str, Any]:
        """Return the object that `kubectl apply` takes."""
        metadata = {"name": self.name, **({"namespace": self.namespace} if self.namespace else {})}
        pods = {"name": "node", "replicas": self.nodes, "template": {"metadata": metadata, "spec": self._pod()}}
        return {
            "apiVersion": "sagemaker.amazonaws.com/v1",
            "kind": "HyperPodPyTorchJob",
            "metadata": metadata,
            "spec": {"nprocPerNode": str(self.processes), "replicaSpecs": [pods], "runPolicy": self._run_policy()},
        }

    def _run_policy(self) -> dict[str, Any]:
        """Return when the operator ends or restarts the job.

        The operator's agent reads the standard output of each rank. Only lines that every rank prints are of use.
        """
        progress = {
            "name": "training-progress",
            "logPattern": f".*{PACE_PREFIX}",  # from the beginning of a line, which the agent may have put a mark before
            "stopPattern": f".*{USAGE_PREFIX}",
            "expectedStartCutOffInSeconds": self.start_seconds,
            "expectedRecurringFrequencyInSeconds": self.hang_seconds,
        }
        return {
            "cleanPodPolicy": "None",  # the logs of a job that has ended stay
            "jobMaxRetryCount": self.restarts,
            "restartPolicy": {"evalPeriodSeconds": _RESTART_PERIOD_SECONDS, "maxFullJobRestarts": self.restarts},
            "logMonitoringConfiguration": [progress],
        }

    def _pod(self) -> dict[str, Any]:
        claims = [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in self.volumes]
        pod: dict[str, Any] = {
            "terminationGracePeriodSeconds": _POD_GRACE_SECONDS,
            "containers": [self._container()],
            "volumes": [*claims, {"name": _SHARED_MEMORY, "emptyDir": {"medium": "Memory"}}],
        }
        if self.instance_type:
            pod["nodeSelector"] = {"node.kubernetes.io/instance-type": self.instance_type}
        return pod

    def _container(self) -> dict[str, Any]:
        known = instance(self.instance_type) if self.instance_type else None
        gpus = {"nvidia.com/gpu": str(self.processes)} if known is not None and known.gpus else {}
        mounts = [{"name": claim, "mountPath": path} for claim, path in self.volumes.items()]
        return {
            "name": "pytorch",
            "image": self.image,
            "command": self._command(),
            "args": [self.script, *self.words],
            "env": self._variables(),
            "volumeMounts": [*mounts, {"name": _SHARED_MEMORY, "mountPath": "/dev/shm"}],
            **({"resources": {"requests": gpus, "limits": gpus}} if gpus else {}),
        }

    def _command(self) -> list[str]:
        """Return the command of a pod: the operator's agent starts one `smp-launch run` for each rank."""
        agent = ["hyperpodrun", f"--nnodes={self.nodes}", f"--nproc-per-node={self.processes}"]
        agent += ["--shutdown-signal=SIGTERM", f"--shutdown-timeout={GRACE_SECONDS}", "--no-python"]
        return [*agent, "smp-launch", "run", "--parameters", json.dumps(dict(self.parameters))]

    def _variables(self) -> list[dict[str, Any]]:
        given = {**self.environment, RECORDS_VARIABLE: str(_RECORD_SECONDS)}
        variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in given.items()]
        if self.secret:
            key = {"name": self.secret, "key": "secret"}
            variables.append({"name": SECRET_VARIABLE, "valueFrom": {"secretKeyRef": key}})
        return variables
