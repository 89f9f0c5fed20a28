"""``suggest()``: degrees for a model and a cluster, or the smallest cluster itself."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smp_config import ConfigError
from smp_config.machine.instances import instance, require_usable
from smp_estimator.planning.advice import GB, format_memory
from smp_estimator.planning.forecast import Verdict
from smp_estimator.planning.report import Cell, ColouredText, Grid, Lines, Report, Shown
from smp_estimator.planning.request import Request, is_of_transformers, request_for, shape_given
from smp_estimator.planning.search.clusters import MOST_INSTANCES, Ask, Cluster, smallest_cluster, smallest_clusters
from smp_estimator.planning.search.heuristic_steps import TriedConfiguration, climb, sharded_plans
from smp_estimator.planning.search.improvement import Improvement, find_improvements, search_dict, search_line
from smp_estimator.planning.search.planned import BUDGET_SECONDS, search_plans
from smp_estimator.planning.search.preference import PreferredClusters, check_preference, fastest_step, rank_clusters
from smp_estimator.planning.table import plan_report

if TYPE_CHECKING:
    from smp_estimator.planning.plan import Plan
    from smp_estimator.planning.search.branch_and_bound import Found


@dataclass(frozen=True)
class Suggestion(Shown):
    """The chosen configuration.

    Attributes:
        plan: its plan; look at ``plan.verdict``, since the best that was found may still not fit.
        tried: everything that was tried up to it, in order.
        alternative: the sharded data parallelism that fits and has the shortest step, when none was chosen itself.
        clusters: the smallest clusters on which the model fits, when the cluster was left open (the first is the one that
            was chosen) or does not suffice; empty when it suffices, and when no cluster does.
        searched: whether the cluster was left open, in whole or in part.
        prefer: ``"smallest"``, ``"cheapest"`` or ``"fastest"``: by what clusters were compared, and configurations of one.
        left_out: types that could not be compared, and why; in words.
        search: what the search over all degrees of a given cluster came to, where the cheapest or the fastest is wanted.
        improvements: single changes of the settings that were given, which help; the one that helps most first;
            None where none were given.
    """

    plan: Plan
    tried: tuple[TriedConfiguration, ...]
    alternative: TriedConfiguration | None
    clusters: tuple[Cluster, ...] = ()
    searched: bool = False
    prefer: str = "smallest"
    left_out: tuple[str, ...] = ()
    search: Found | None = None
    improvements: tuple[Improvement, ...] | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """Return ``mp_parameters`` for ``distribution``, with the degree under its documented name only."""
        given = self.plan.request.parameters.to_mp_parameters()
        given.pop("partitions")
        return {name: value for name, value in given.items() if value is True or (value is not False and value != 1)}

    @property
    def batch(self) -> int:
        """Return the batch size for the script."""
        return self.plan.request.workload.batch

    @property
    def instance_type(self) -> str:
        """Return the instance type of the plan's cluster."""
        return self.plan.request.instance_type

    @property
    def instance_count(self) -> int:
        """Return the number of instances of the plan's cluster."""
        return self.plan.request.instance_count

    def to_dict(self) -> dict[str, Any]:
        """Return the suggestion as plain Python values, sizes in bytes."""
        return {
            "instance_type": self.instance_type,
            "instance_count": self.instance_count,
            "parameters": self.parameters,
            "batch": self.batch,
            "prefer": self.prefer,
            "left_out": list(self.left_out),
            "search": None if self.search is None else search_dict(self.search),
            "improvements": None if self.improvements is None else [each.to_dict() for each in self.improvements],
            "tried": [
                {
                    "what": s.what,
                    "total_bytes": s.plan.total_bytes,
                    "verdict": s.plan.verdict.name,
                    "seconds_per_step": None if s.plan.time is None else s.plan.time.total,
                }
                for s in self.tried
            ],
            "alternative": None if self.alternative is None else _alternative_dict(self.alternative),
            "clusters": [
                {
                    "instance_type": c.instance_type,
                    "instance_count": c.instance_count,
                    "gpus": c.gpus,
                    "what": c.step.what,
                    "total_bytes": c.plan.total_bytes,
                    "tokens_per_second": None if c.plan.time is None else c.plan.time.tokens_per_second,
                    "usd_per_million_tokens": None if c.plan.cost is None else c.plan.cost.usd_per_million_tokens,
                }
                for c in self.clusters
            ],
            "plan": self.plan.to_dict(),
        }

    def report(self) -> Report:
        """Return a report of the clusters, or of the configurations tried on the given one, and of the chosen plan."""
        other, script = self.alternative, self.plan.request.workload
        fits = self.plan.verdict.feasible
        word = "← chosen" if fits else "← nearest"
        tried: list[list[Cell]] = [
            [
                step.what,
                f"{step.plan.total_bytes / GB:,.1f} GB",
                "" if step.plan.time is None else f"{step.plan.time.total:.3g} s",
                _verdict(step.plan, word if step.plan is self.plan else ""),
            ]
            for step in self.tried
        ]
        asked = f"{self.instance_count} × {self.instance_type}"
        parts: list[Lines | Grid] = []
        if self.clusters and self.searched:
            parts.append(_clusters_grid(f"the {self.prefer} clusters that fit", self.clusters, self.clusters[0]))
        if self.left_out:
            parts.append(Lines([("not compared", self.left_out)]))
        title = f"tried on {asked}, in the order of the best practices"
        if self.prefer != "smallest" and fits and self.plan.time is not None:
            title += "; of those that fit the one with the shortest step is chosen"
        compared = self.searched and len(self.clusters) > 1
        if not compared:  # else each cluster has its configuration beside it, and ``tried`` the rest
            parts.append(Grid(["configuration", "per GPU", "step", "verdict"], tried, frozenset({1, 2}), title=title))
        if self.search is not None:
            parts.append(Lines([("searched", [search_line(self.search)])]))
        if self.improvements is not None:
            said = [str(each) for each in self.improvements[:3]]
            parts.append(
                Lines([("one change", said or ["of the parameters that were given, none makes a step shorter"])])
            )
        if fits:
            rows: list[tuple[str, list[Cell]]] = [
                ("instead", [_alternative_line(other, self.plan)] if other else []),
                ("parameters", [str(self.parameters)]),
                ("script", [f"batch {script.batch}, activation checkpointing {script.activation_checkpointing}"]),
            ]
        else:
            nothing = [f"nothing fits on {asked}; the nearest is shown below"]
            if not self.clusters:
                nothing.append(
                    f"no cluster of up to {MOST_INSTANCES:,} instances fits either; try a smaller batch or a shorter sequence"
                )
            rows = [("verdict", [ColouredText(line, Verdict.DOES_NOT_FIT) for line in nothing])]
        parts.append(Lines(rows))
        if self.clusters and not self.searched:
            parts.append(_clusters_grid("would fit on", self.clusters, None))
        plan = plan_report(self.plan, self.plan.changes, self.plan.smaller_clusters, self.plan.notes, searched=True)
        return [*parts, Lines([("", [""])]), *plan]


def _verdict(plan: Plan, more: str) -> ColouredText:
    return ColouredText(f"{plan.verdict.value} {more}".rstrip(), plan.verdict)


def _alternative_dict(other: TriedConfiguration) -> dict[str, Any]:
    return {
        "what": other.what,
        "total_bytes": other.plan.total_bytes,
        "tokens_per_second": None if other.plan.time is None else other.plan.time.tokens_per_second,
    }


def _alternative_line(other: TriedConfiguration, chosen: Plan) -> str:
    """Return the alternative with its memory, and its speed beside that of the chosen configuration."""
    line = f"{other.what}: {format_memory(other.plan)}"
    if other.plan.time is None or chosen.time is None:
        return line
    mine, its = chosen.time.tokens_per_second, other.plan.time.tokens_per_second
    share = its / mine - 1
    compared = "as many" if abs(share) < 0.001 else f"{abs(share):.1%} {'more' if share > 0 else 'less'}"
    return f"{line}; {its:,.0f} tokens per second, {compared}"


def _clusters_grid(title: str, clusters: tuple[Cluster, ...], chosen: Cluster | None) -> Grid:
    rows: list[list[Cell]] = []
    for each in clusters:
        known = each.plan.instance
        gpus = f"{each.gpus} × {known.gpu}" if known else str(each.gpus)
        note = " (slow: no EFA)" if each.is_slow else ""
        share = f"{each.plan.total_bytes / GB:.1f} of {(each.plan.request.gpu_memory_bytes or 0) / GB:.1f} GB"
        said = ColouredText("fits ← chosen", Verdict.FITS) if each is chosen else ColouredText("fits", Verdict.FITS)
        time, cost = each.plan.time, each.plan.cost
        speed = "unknown" if time is None else f"{time.tokens_per_second:,.0f}"
        price = (
            "unknown" if cost is None else f"{cost.usd_per_million_tokens:.3g}" + (" (given)" if cost.is_given else "")
        )
        rows.append([f"{each}{note}", gpus, _in_short(each.step.what), share, speed, price, said])
    columns = ["instances", "GPUs", "with", "per GPU", "tokens/s", "USD per 10⁶ tokens", "verdict"]
    return Grid(columns, rows, frozenset({3, 4, 5}), title=title)


def _in_short(what: str) -> str:
    """Return a configuration short enough for a row with six more columns: ``sharded 48 + tensor 4``."""
    return re.sub(r"(sharded|tensor)( data)? parallelism (?=\d)", r"\1 ", what.removeprefix("+ "))


def suggest(  # noqa: PLR0913 - each of a caller's options has its own name
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
    prefer: str = "smallest",
    up_to: int | None = None,
    parameters: Mapping[str, Any] | None = None,
    budget: float = BUDGET_SECONDS,
    **workload: Any,
) -> Suggestion:
    """Pick degrees for a model and a cluster, or a cluster too: the smallest, the cheapest or the fastest.

    The first configuration that fits is chosen. If the cheapest or the fastest is wanted, it is the one with the
    shortest step. If none fits, the first tight one is chosen, else the nearest one; the result then names the
    clusters that would be large enough. On a given cluster, the search for the cheapest and the fastest is not
    limited to the best practices. It covers all degrees, ways to store state and activations, microbatches and
    placements (:mod:`~smp_estimator.planning.search.branch_and_bound`).

    Args:
        model: as for :func:`~smp_estimator.planning.plan.plan`.
        instance_type: the available instances; None searches for the type, among all that current builds of
            PyTorch run on.
        instance_count: how many; None searches for the fewest on which the model fits.
        batch: samples per GPU and pass; the global batch is this times the processes and the accumulation, for
            all degrees.
        global_batch: samples per optimizer step, instead of ``batch``.
        precision: ``"bf16"``, ``"fp16"``, ``"fp32"`` or ``"auto"``: bf16 if the GPU has it, else fp16; with
            ``autocast`` fp32.
        prefer: which of the clusters that fit: ``"smallest"``, ``"cheapest"`` (price of a token) or ``"fastest"``
            (tokens per second), by the times and prices of ``plan``.
        up_to: most instances that are considered for the last two; default: the fewest of each type for the
            cheapest, and as many as the smallest cluster of all has for the fastest.
        parameters: current ``mp_parameters``, for a given cluster. The suggestion then lists single changes of
            them that would help, the most helpful first.
        budget: seconds that the search over all degrees may take; the result reports if it was not complete.
        sequence, processes_per_host, gpu_memory_bytes, environment, workload: as for ``plan``.

    Raises:
        ConfigError: arguments that cannot be used, or no cluster that is large enough when the type is open.
    """
    _check(precision, prefer, up_to, instance_type, instance_count, gpu_memory_bytes)
    if workload.get("step_seconds") is not None:
        raise ConfigError(
            f"step_seconds is {workload['step_seconds']!r}; it is the time of one configuration, and suggest() compares many: give "
            "it to plan(), with the parameters that it was measured with, or utilisation to both",
            code="SMP110",
        )
    require_usable(instance_type)
    shape = shape_given(model, sequence)  # read once, for all that is tried
    if workload.get("fp32_loss") is None:
        workload["fp32_loss"] = is_of_transformers(model)

    precision = _of_autocast(precision, workload)

    def ask(kind: str, count: int) -> tuple[Request, int]:
        request = request_for(
            shape,
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
                f"the memory of {kind!r} is unknown, so nothing can be said to fit; give gpu_memory_bytes, the memory of one GPU",
                code="SMP110",
            )
        return request, global_batch or batch * request.world * request.workload.accumulation

    if parameters is not None and (instance_type is None or instance_count is None):
        raise ConfigError(
            f"parameters were given, but instance_type is {instance_type!r} and instance_count {instance_count!r}; single changes "
            "are compared on one cluster: give both, or leave parameters out",
            code="SMP110",
        )
    if instance_type is not None and instance_count is not None:
        request, read = ask(instance_type, instance_count)
        found = _on(request, read, prefer, budget=budget)
        if parameters is not None:
            helping = find_improvements(request, read, parameters, budget)
            found = dataclasses.replace(found, improvements=helping)
        return found if found.plan.verdict.feasible else _with_clusters(found, ask)
    if prefer != "smallest":
        ask(instance_type or "ml.p4d.24xlarge", instance_count or 1)  # raise for a wrong argument, as below
        choice = rank_clusters(ask, prefer, kind=instance_type, count=instance_count, up_to=up_to)
        if choice.clusters:
            return _chosen(choice.clusters, ask, prefer, choice.left_out)
        _refuse_incomparable(ask, choice, prefer, instance_type, instance_count, up_to)
    samples = f"a global batch of {global_batch}" if global_batch else f"{batch} samples per GPU"
    return _smallest(ask, instance_type, instance_count, samples)


def _smallest(ask: Ask, instance_type: str | None, instance_count: int | None, samples: str) -> Suggestion:
    """Return a suggestion for the smallest cluster, of one type or of any.

    Args:
        samples: the samples of a step, in words.

    Raises:
        ConfigError: no cluster of any type is large enough.
    """
    if instance_type is not None:
        cluster = smallest_cluster(ask, instance_type)
        if cluster is None:
            return _with_clusters(_on(*ask(instance_type, 1)), ask)
        return _chosen((cluster,), ask)
    # Raise for a wrong argument here: the search itself would take it for a type that cannot be used.
    ask("ml.p4d.24xlarge", 1 if instance_count is None else instance_count)
    clusters = smallest_clusters(ask, instance_count)
    if not clusters:
        many = f"{instance_count} instances" if instance_count else f"up to {MOST_INSTANCES:,} instances"
        others = smallest_clusters(ask) if instance_count else ()
        remedy = f"it fits on {others[0]}" if others else "use a smaller batch, a shorter sequence or a smaller model"
        raise ConfigError(
            f"the model fits on no cluster of {many} of any current type with {samples}; {remedy}", code="SMP110"
        )
    return _chosen(clusters, ask)


def _check(
    precision: str,
    prefer: str,
    up_to: int | None,
    instance_type: str | None,
    instance_count: int | None,
    gpu_memory_bytes: int | None,
) -> None:
    """Refuse arguments that are invalid, alone or together."""
    if precision not in ("auto", "bf16", "fp16", "fp32"):
        raise ConfigError(
            f"precision is {precision!r}; parameters are kept in one of auto, bf16, fp16, fp32: use one of these",
            code="SMP110",
        )
    check_preference(prefer)
    if up_to is not None and (isinstance(up_to, bool) or not isinstance(up_to, int) or up_to < 1):
        raise ConfigError(
            f"up_to is {up_to!r}; it is a number of instances: set it to 1 or more, or leave it out", code="SMP110"
        )
    if up_to is not None and (prefer == "smallest" or instance_count is not None):
        other = f"instance_count {instance_count}" if instance_count is not None else 'prefer="smallest"'
        raise ConfigError(
            f'up_to is {up_to}, but {other} settles the number of instances; leave up_to out, or use prefer="cheapest" or '
            '"fastest" without instance_count',
            code="SMP110",
        )
    if instance_type is None and gpu_memory_bytes is not None:
        raise ConfigError(
            "gpu_memory_bytes was given, but no instance_type, and GPUs of each type have their own memory: give instance_type "
            "too, or leave gpu_memory_bytes out",
            code="SMP110",
        )


def _of_autocast(precision: str, workload: Mapping[str, Any]) -> str:
    """Return fp32 for ``"auto"`` under autocast, whose parameters stay in fp32."""
    return "fp32" if workload.get("autocast") and precision == "auto" else precision


def _precision(precision: str, kind: str) -> dict[str, bool]:
    if precision == "auto":
        known = instance(kind)
        precision = "bf16" if known is None or known.gpu_facts.has_bf16 else "fp16"
    return {precision: True} if precision != "fp32" else {}


def _chosen(
    clusters: tuple[Cluster, ...], ask: Ask, prefer: str = "smallest", left_out: tuple[str, ...] = ()
) -> Suggestion:
    """Return the suggestion for the first of these clusters."""
    first = clusters[0]
    found = _on(*ask(first.instance_type, first.instance_count), prefer)
    return dataclasses.replace(found, clusters=clusters, searched=True, left_out=left_out)


def _refuse_incomparable(
    ask: Ask,
    choice: PreferredClusters,
    prefer: str,
    instance_type: str | None,
    instance_count: int | None,
    up_to: int | None,
) -> None:
    """Raise ConfigError if the model fits only on larger clusters, or on none with a known price or speed."""
    first = (
        smallest_cluster(ask, instance_type)
        if instance_type
        else next(iter(smallest_clusters(ask, instance_count)), None)
    )
    if first is None:
        return
    if up_to is not None and first.instance_count > up_to:
        raise ConfigError(
            f"up_to is {up_to}, but the fewest instances on which the model fits are {first}; raise up_to to "
            f"{first.instance_count}, or use a smaller batch or a shorter sequence",
            code="SMP110",
        )
    if choice.left_out:
        raise ConfigError(
            f"prefer is {prefer!r}, and the model fits on {first}, but not on a cluster that can be compared: "
            f'{"; ".join(choice.left_out)}; give prices for what has none, or use prefer="smallest"',
            code="SMP110",
        )


def _with_clusters(found: Suggestion, ask: Ask) -> Suggestion:
    """Return the suggestion with the clusters that would be large enough, those of the same type first."""
    request = found.plan.request
    clusters = []
    same = smallest_cluster(ask, request.instance_type)
    if same is not None:
        clusters.append(same)
    if instance(request.instance_type) is not None:
        others = smallest_clusters(ask)
        clusters += [other for other in others if same is None or other.instance_type != same.instance_type]
    return dataclasses.replace(found, clusters=tuple(clusters))


def _on(request: Request, samples: int, prefer: str = "smallest", *, budget: float = 0.0) -> Suggestion:
    """Return the degrees for a given cluster.

    Args:
        budget: seconds of a search over all configurations, for the cheapest and the fastest; 0: no search.
    """
    if prefer != "smallest":
        every = [*climb(request, samples), *sharded_plans(request, samples)]
        wide = search_plans(request, samples, budget=budget) if budget else None
        if wide is not None and wide.plan is not None and wide.found.best is not None:
            every.append(TriedConfiguration(str(wide.found.best.configuration), wide.plan))
            best = fastest_step(every) or every[-1]
            return Suggestion(best.plan, tuple(every), None, prefer=prefer, search=wide.found)
        if (fastest := fastest_step(every)) is not None and fastest.plan.time is not None:
            return Suggestion(fastest.plan, tuple(every), None, prefer=prefer)
    tried: list[TriedConfiguration] = []
    chosen: TriedConfiguration | None = None
    for step in climb(request, samples):
        tried.append(step)
        if step.plan.verdict is Verdict.FITS:
            chosen = step
            break
    beside = list(sharded_plans(request, samples))
    first_sharded = next((step for step in beside if step.plan.verdict is Verdict.FITS), None)
    if chosen is None:
        tried += beside
        if not tried:
            raise ConfigError(
                f"no degrees give a global batch of {samples} samples on {request.world} processes; each process, or group "
                f"of processes, reads whole samples: use a global batch of {request.world}",
                code="SMP110",
            )
        tight = [step for step in tried if step.plan.verdict is Verdict.TIGHT]
        chosen = first_sharded or (tight[0] if tight else min(tried, key=lambda step: step.plan.total_bytes))
    alternative = fastest_step(beside) or first_sharded
    if chosen.plan.request.parameters.sharded_data_parallel_degree > 1:
        alternative = None
    return Suggestion(chosen.plan, tuple(tried), alternative, prefer=prefer)
