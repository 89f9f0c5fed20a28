"""The answers to five questions about a first job, and the resulting distribution."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from smp_config import ConfigError
from smp_config.machine.instances import instance

#: What is trained.
MODELS = {"own": "a module of your own", "transformers": "a language model of Transformers"}

#: How it is divided.
STRATEGIES = {
    "data": "data parallelism: the model fits into one GPU",
    "sharded": "sharded data parallelism: parameters, gradients and optimizer state are shared out",
    "pipeline": "pipeline parallelism: each rank has some of the layers",
    "tensor": "tensor parallelism: each rank has a part of every layer",
}

#: The instance type that stands for processes of this machine.
LOCAL = "local"


@dataclass(frozen=True)
class Answers:
    """A first job.

    Attributes:
        processes: ranks of one host.
        instance_type: ``local``, or a type of the service.
        checkpoints: whether it saves during training, and resumes automatically.
    """

    model: str = "own"
    strategy: str = "data"
    processes: int = 2
    instance_type: str = LOCAL
    checkpoints: bool = True

    def check(self) -> None:
        """Raise ConfigError for answers that no job can have.

        Raises:
            ConfigError: more processes than the instance has GPUs, or a strategy that needs several and has one.
        """
        known = None if self.instance_type == LOCAL else instance(self.instance_type)
        if known is not None and 0 < known.gpus < self.processes:
            raise ConfigError(
                f"{self.processes} processes are too many for {self.instance_type}, which has {known.gpus} GPUs, one for each: "
                f"use --processes {known.gpus} at the most",
                code="SMP108",
            )
        if self.processes == 1 and self.strategy != "data":
            raise ConfigError(
                f"the strategy {self.strategy} divides a model over ranks, and --processes is 1: use 2 or more, or "
                "--strategy data",
                code="SMP108",
            )

    @property
    def parameters(self) -> dict[str, Any]:
        """Return ``parameters`` of the model parallel library: all ranks share one model, or one batch."""
        more: dict[str, dict[str, Any]] = {
            "data": {},
            "sharded": {"sharded_data_parallel_degree": self.processes, "sdp_param_persistence_threshold": 1000},
            "pipeline": {"pipeline_parallel_degree": self.processes, "microbatches": 2 * self.processes},
            "tensor": {"tensor_parallel_degree": self.processes},
        }
        return {"ddp": True, **more[self.strategy]}

    @property
    def command(self) -> str:
        """Return the shell command that runs the script on this machine."""
        kept = " --checkpoints checkpoints" if self.checkpoints else ""
        return (
            f"smp-estimator run train.py --processes {self.processes}{kept} --output output \\\n"
            f"  --parameters '{json.dumps(self.parameters)}'"
        )
