"""``plan()``: will this model train with these settings on these instances, and where does the memory go?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from smp_estimator.figures.placement import Placement
from smp_estimator.planning.advice import Change, SmallerCluster, list_notes, smaller_clusters, suggest_changes
from smp_estimator.planning.forecast import Forecast
from smp_estimator.planning.report import Report, Shown
from smp_estimator.planning.request import request_for
from smp_estimator.planning.table import plan_report

if TYPE_CHECKING:
    from smp_config import ModelParallelParameters


@dataclass(frozen=True)
class Plan(Shown, Forecast):
    """A forecast with advice; ``print(plan)`` and a notebook show it as a table."""

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """Return the changes to try if the plan does not fit or is tight: each one alone, with its result."""
        return suggest_changes(self)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Return useful facts about the plan besides its memory."""
        return list_notes(self)

    @cached_property
    def smaller_clusters(self) -> tuple[SmallerCluster, ...]:
        """Return the results of the same job on 1/2, 1/4, … of the instances."""
        return smaller_clusters(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain Python values, sizes in bytes."""
        request = self.request
        return {
            "model": {
                "parameters": request.shape.parameters,
                "shape": str(request.shape),
                "source": request.shape.source,
            },
            "instance_type": request.instance_type,
            "instance_count": request.instance_count,
            "processes_per_host": request.processes_per_host,
            "mp_parameters": request.parameters.to_mp_parameters(),
            "workload": dataclasses.asdict(request.workload),
            "verdict": self.verdict.name.lower(),
            "gpu_memory_bytes": request.gpu_memory_bytes,
            "total_bytes": self.total_bytes,
            "fraction": self.fraction,
            "stages": [
                {
                    "stage": s.stage,
                    "layers": s.layers,
                    "total": s.total,
                    "at_loss": s.at_loss,
                    "in_optimizer_step": s.in_update,
                    **{k.value: v for k, v in s.kinds.items()},
                }
                for s in self.stages
            ],
            "memory_checkpoint_bytes_per_host": self.memory_checkpoint_bytes,
            "global_batch": self.batches.global_batch,
            "tokens_per_step": self.batches.tokens,
            "epochs": None if self.epochs is None else self.epochs.to_dict(),
            "pipeline_idle": self.idle,
            "bytes_sent_per_rank": self.traffic.total,
            "step_time": None if self.time is None else self.time.to_dict(),
            "step_cost": None if self.cost is None else self.cost.to_dict(),
            "training": None if self.training is None else self.training.to_dict(),
            "goodput": None if self.goodput is None else self.goodput.to_dict(),
            "rule_of_16_bytes": 16 * request.shape.parameters,
            "rule_of_20_bytes": 20 * request.shape.parameters,
            "changes": [str(change) for change in self.changes],
            "smaller_clusters": [str(smaller) for smaller in self.smaller_clusters],
            "notes": list(self.notes),
        }

    @property
    def placement(self) -> Placement:
        """Return the host and the part of the model of each rank; a notebook shows it as a picture."""
        return Placement(self.topology, self.request.processes_per_host)

    def _repr_html_(self) -> str:
        shown: str = super()._repr_html_()
        return shown if self.topology.world_size == 1 else f"{shown}{self.placement._repr_html_()}"

    def report(self) -> Report:
        """Return the report that is printed."""
        return plan_report(self, self.changes, self.smaller_clusters, self.notes)


def plan(
    model: Any,
    instance_type: str,
    instance_count: int = 1,
    parameters: ModelParallelParameters | Mapping[str, Any] | str | None = None,
    batch: int | None = None,
    *,
    sequence: int | None = None,
    processes_per_host: int | None = None,
    gpu_memory_bytes: int | None = None,
    environment: Mapping[str, str] | None = None,
    **workload: Any,
) -> Plan:
    """Return a plan: whether a model trains on a cluster, and where the memory goes.

    Args:
        model: an ``nn.Module`` (the meta device is enough), a :class:`ModelShape`, the name of a published model,
            a number of parameters, or a configuration of Transformers: the object, its dictionary, or the path of
            ``config.json`` or of its folder.
        instance_type: such as ``"ml.p4d.24xlarge"``.
        instance_count: instances.
        parameters: ``mp_parameters``; None means a single copy of the model on each GPU with ``ddp``.
        batch: samples that a rank reads at a time; with ``prescaled_batch`` that a tensor parallel group reads;
            default: one for each microbatch.
        sequence: tokens per sample; default: the shape's.
        processes_per_host: default: the GPUs of the instance.
        gpu_memory_bytes: memory of one GPU; default: the catalogue's.
        environment: of the job; it has the sizes of the SMDDP buffers, and whether there are memory checkpoints.
        workload: fields of :class:`~smp_estimator.planning.request.Workload`: ``activation_checkpointing``,
            ``fused_attention``, ``dropout``, ``optimizer``, ``accumulation``, …. For the data set: ``samples`` or
            ``tokens``, and ``epochs`` or ``steps``. For time and cost: ``step_seconds``, the measured time of a
            step, or ``utilisation``, the part of its peak that a GPU reaches; and ``prices``, of one instance in
            US dollars per hour by its type, default: the catalogue's, which are EC2's.

    Raises:
        ConfigError: settings that cannot work.
    """
    request = request_for(
        model,
        instance_type,
        instance_count,
        parameters,
        sequence=sequence,
        processes_per_host=processes_per_host,
        gpu_memory_bytes=gpu_memory_bytes,
        environment=environment,
        workload={"batch": batch, **workload},
    )
    made = Plan.of(request)
    if made.training is not None:
        # Here, as a plan that was made can be shown.
        made.failures.check_progress()
    return made
