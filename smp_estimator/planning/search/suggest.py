"""``suggest()``: degrees for a model and a cluster, or the smallest cluster itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smp_config import ConfigError
from smp_config.instances import instance
from smp_estimator.planning.advice import GB, amount, has_bfloat16
from smp_estimator.planning.forecast import Verdict
from smp_estimator.planning.report import Cell, Grid, Lines, Report, Said, Shown
from smp_estimator.planning.request import Request, request_for
from smp_estimator.planning.search.clusters import MOST_INSTANCES, Cluster, smallest, smallest_clusters
from smp_estimator.planning.search.ladder import Step, climb, sharded
from smp_estimator.planning.table import plan_report

if TYPE_CHECKING:
    from smp_estimator.planning.plan import Plan


@dataclass(frozen=True)
class Suggestion(Shown):
    """The chosen configuration.

    Attributes:
        plan: its plan; look at ``plan.verdict``, since the best that was found may still not fit.
        tried: everything that was tried up to it, in order.
        alternative: the smallest sharded data parallelism that fits, when it was not chosen itself.
        clusters: the smallest clusters on which the model fits, when the cluster was left open (the first is the one that
            was chosen) or does not suffice; empty when it suffices, and when no cluster does.
        searched: whether the cluster was left open, in whole or in part.
    """

    plan: Plan
    tried: tuple[Step, ...]
    alternative: Step | None
    clusters: tuple[Cluster, ...] = ()
    searched: bool = False

    @property
    def parameters(self) -> dict[str, Any]:
        """``mp_parameters`` for ``distribution``, with the degree under its documented name only."""
        given = self.plan.request.parameters.to_mp_parameters()
        given.pop("partitions")
        return {name: value for name, value in given.items() if value is True or (value is not False and value != 1)}

    @property
    def batch(self) -> int:
        """The batch size for the script."""
        return self.plan.request.workload.batch

    @property
    def instance_type(self) -> str:
        """Of the cluster that the plan is for."""
        return self.plan.request.instance_type

    @property
    def instance_count(self) -> int:
        """Of the cluster that the plan is for."""
        return self.plan.request.instance_count

    def to_dict(self) -> dict[str, Any]:
        """The suggestion as plain Python values, sizes in bytes."""
        return {
            "instance_type": self.instance_type,
            "instance_count": self.instance_count,
            "parameters": self.parameters,
            "batch": self.batch,
            "tried": [
                {"what": s.what, "total_bytes": s.plan.total_bytes, "verdict": s.plan.verdict.name} for s in self.tried
            ],
            "clusters": [
                {
                    "instance_type": c.instance_type,
                    "instance_count": c.instance_count,
                    "gpus": c.gpus,
                    "what": c.step.what,
                    "total_bytes": c.plan.total_bytes,
                }
                for c in self.clusters
            ],
            "plan": self.plan.to_dict(),
        }

    def report(self) -> Report:
        """The clusters, what was tried, in order, and the plan that was chosen."""
        other, script = self.alternative, self.plan.request.workload
        fits = self.plan.verdict.feasible
        word = "← chosen" if fits else "← nearest"
        tried: list[list[Cell]] = [
            [
                step.what,
                f"{step.plan.total_bytes / GB:,.1f} GB",
                _verdict(step.plan, word if step.plan is self.plan else ""),
            ]
            for step in self.tried
        ]
        asked = f"{self.instance_count} × {self.instance_type}"
        parts: list[Lines | Grid] = []
        if self.clusters and self.searched:
            parts.append(_clusters_grid("the smallest clusters that fit", self.clusters, self.clusters[0]))
        title = f"tried on {asked}, in the order of the best practices"
        parts.append(Grid(["configuration", "per GPU", "verdict"], tried, frozenset({1}), title=title))
        if fits:
            rows: list[tuple[str, list[Cell]]] = [
                ("instead", [f"{other.what}: {amount(other.plan)}"] if other else []),
                ("parameters", [str(self.parameters)]),
                ("script", [f"batch {script.batch}, activation checkpointing {script.activation_checkpointing}"]),
            ]
        else:
            nothing = [f"nothing fits on {asked}; the nearest is shown below"]
            if not self.clusters:
                nothing.append(
                    f"no cluster of up to {MOST_INSTANCES:,} instances fits either; try a smaller batch or a shorter sequence"
                )
            rows = [("verdict", [Said(line, Verdict.DOES_NOT_FIT) for line in nothing])]
        parts.append(Lines(rows))
        if self.clusters and not self.searched:
            parts.append(_clusters_grid("would fit on", self.clusters, None))
        plan = plan_report(self.plan, self.plan.changes, self.plan.smaller_clusters, self.plan.notes, searched=True)
        return [*parts, Lines([("", [""])]), *plan]


def _verdict(plan: Plan, more: str) -> Said:
    return Said(f"{plan.verdict.value} {more}".rstrip(), plan.verdict)


def _clusters_grid(title: str, clusters: tuple[Cluster, ...], chosen: Cluster | None) -> Grid:
    rows: list[list[Cell]] = []
    for each in clusters:
        known = each.plan.instance
        gpus = f"{each.gpus} × {known.gpu}" if known else str(each.gpus)
        note = " (slow: no EFA)" if each.is_slow else ""
        share = f"{each.plan.total_bytes / GB:.1f} of {(each.plan.request.gpu_memory_bytes or 0) / GB:.1f} GB"
        said = Said("fits ← chosen", Verdict.FITS) if each is chosen else Said("fits", Verdict.FITS)
        rows.append([f"{each}{note}", gpus, each.step.what.removeprefix("+ "), share, said])
    return Grid(["instances", "GPUs", "with", "per GPU", "verdict"], rows, frozenset({3}), title=title)


def suggest(
    model: Any,
    instance_type: str | None = None,
    instance_count: int | None = None,
    batch: int = 1,
    *,
    global_batch: int | None = None,
    precision: str = "auto",
    sequence: int | None = None,
    processes_per_host: int | None = None,
    gpu_memory_bytes: int | None = None,
    environment: Mapping[str, str] | None = None,
    **workload: Any,
) -> Suggestion:
    """Pick degrees for a model and a cluster, or the smallest cluster too.

    The first configuration that fits wins; without one the first that is tight, else the one that comes nearest, and
    the clusters that would be large enough are named.

    Args:
        model: as for :func:`~smp_estimator.planning.plan.plan`.
        instance_type: the instances that there are; None looks for the type, among all that current builds of PyTorch
            run on.
        instance_count: how many; None looks for the fewest on which the model fits.
        batch: samples per GPU and step; the global batch is this times the processes, whatever the degrees.
        global_batch: samples per optimizer step, instead of ``batch``.
        precision: ``"bf16"``, ``"fp16"``, ``"fp32"`` or ``"auto"``: bf16 where the GPU has it, else fp16.
        sequence, processes_per_host, gpu_memory_bytes, environment, workload: as for ``plan``.

    Raises:
        ConfigError: arguments that cannot be used, or no cluster that is large enough when the type is open.
    """
    if precision not in ("auto", "bf16", "fp16", "fp32"):
        raise ConfigError(
            f"precision is {precision!r}; parameters are kept in one of auto, bf16, fp16, fp32: use one of these"
        )
    if instance_type is None and gpu_memory_bytes is not None:
        raise ConfigError(
            "gpu_memory_bytes was given, but no instance_type, and GPUs of each type have their own memory: give instance_type "
            "too, or leave gpu_memory_bytes out"
        )

    def ask(kind: str, count: int) -> tuple[Request, int]:
        request = request_for(
            model,
            kind,
            count,
            {"ddp": True} | _precision(precision, kind),
            sequence=sequence,
            processes_per_host=processes_per_host,
            gpu_memory_bytes=gpu_memory_bytes,
            environment=environment,
            workload={"batch": batch, **workload},
        )
        if request.gpu_memory_bytes is None:
            raise ConfigError(
                f"the memory of {kind!r} is unknown, so nothing can be said to fit; give gpu_memory_bytes, the memory of one GPU"
            )
        return request, global_batch or batch * request.world * request.workload.accumulation

    if instance_type is not None and instance_count is not None:
        found = _on(*ask(instance_type, instance_count))
        return found if found.plan.verdict.feasible else _with_clusters(found, ask)
    if instance_type is not None:
        cluster = smallest(ask, instance_type)
        if cluster is None:
            return _with_clusters(_on(*ask(instance_type, 1)), ask)
        return _chosen((cluster,), ask)
    # A wrong argument shall be told, which the search itself would take for a type that cannot be used.
    ask("ml.p4d.24xlarge", 1 if instance_count is None else instance_count)
    clusters = smallest_clusters(ask, instance_count)
    if not clusters:
        many = f"{instance_count} instances" if instance_count else f"up to {MOST_INSTANCES:,} instances"
        samples = f"a global batch of {global_batch}" if global_batch else f"{batch} samples per GPU"
        others = smallest_clusters(ask) if instance_count else ()
        remedy = f"it fits on {others[0]}" if others else "use a smaller batch, a shorter sequence or a smaller model"
        raise ConfigError(f"the model fits on no cluster of {many} of any current type with {samples}; {remedy}")
    return _chosen(clusters, ask)


def _precision(precision: str, kind: str) -> dict[str, bool]:
    if precision == "auto":
        known = instance(kind)
        precision = "bf16" if known is None or has_bfloat16(known.gpu) else "fp16"
    return {precision: True} if precision != "fp32" else {}


def _chosen(clusters: tuple[Cluster, ...], ask: Any) -> Suggestion:
    """The degrees on the first of these clusters."""
    first = clusters[0]
    found = _on(*ask(first.instance_type, first.instance_count))
    return Suggestion(found.plan, found.tried, found.alternative, clusters, searched=True)


def _with_clusters(found: Suggestion, ask: Any) -> Suggestion:
    """What would be large enough: of the same type first."""
    request = found.plan.request
    same = smallest(ask, request.instance_type)
    others = smallest_clusters(ask) if instance(request.instance_type) is not None else ()
    kept = [other for other in others if same is None or other.instance_type != same.instance_type]
    return Suggestion(found.plan, found.tried, found.alternative, (*([same] if same else []), *kept))


def _on(request: Request, samples: int) -> Suggestion:
    """The degrees on a given cluster."""
    tried: list[Step] = []
    chosen: Step | None = None
    for step in climb(request, samples):
        tried.append(step)
        if step.plan.verdict is Verdict.FITS:
            chosen = step
            break
    beside = list(sharded(request, samples))
    alternative = next((step for step in beside if step.plan.verdict is Verdict.FITS), None)
    if chosen is None:
        tried += beside
        if not tried:
            raise ConfigError(
                f"no degrees give a global batch of {samples} samples on {request.world} processes; each process, or group "
                f"of processes, reads whole samples: use a global batch of {request.world}"
            )
        tight = [step for step in tried if step.plan.verdict is Verdict.TIGHT]
        chosen = alternative or (tight[0] if tight else min(tried, key=lambda step: step.plan.total_bytes))
    if chosen.plan.request.parameters.sharded_data_parallel_degree > 1:
        alternative = None
    return Suggestion(chosen.plan, tuple(tried), alternative)
