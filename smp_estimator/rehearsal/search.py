"""The fastest way to train a script on a cluster, among all degrees: every configuration that may be it is rehearsed.

The bounds that spare rehearsals come from two of a single GPU: time of a microbatch, bytes of state and activations.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smp_config import ConfigError, ModelParallelParameters
from smp_config.machine.instances import instance, require_usable
from smp_config.schedules import DOCUMENTED, TRAITS
from smp_config.version2.which_version import refuse_version_2
from smp_estimator.planning.forecast import TIGHT_ABOVE, Verdict
from smp_estimator.planning.report import Cell, ColouredText, Grid, Lines, Report, Shown
from smp_estimator.planning.search.branch_and_bound import Evaluated, Found, Judged, Search, SearchRegion
from smp_estimator.planning.search.improvement import change_line, change_words, search_dict, search_line
from smp_estimator.planning.search.planned import configuration_of_settings, refuse_pieces
from smp_estimator.planning.search.space import Configuration, Space
from smp_estimator.rehearsal.least_work import Alone
from smp_estimator.rehearsal.rehearse import rehearse
from smp_estimator.rehearsal.result import RehearsalFailed, Rehearsed, gpu_memory_of, on_gpu
from smp_records.rate_card import RateCard

#: Stands in the script's arguments for the batch size, which follows from the degrees.
BATCH = "{batch}"

#: Seconds that a search may take, by default.
BUDGET_SECONDS = 600.0

#: Part of the budget after which single changes of what was given are looked at, and then again the best.
_OF_THE_BEST = 0.6

#: What is faster by less is not worth a rehearsal.
_GAP = 0.02

#: Settings of ``mp_parameters`` that the search chooses.
_CHOSEN = frozenset(
    "partitions pipeline_parallel_degree tensor_parallel_degree prescaled_batch sharded_data_parallel_degree "
    "shard_optimizer_state microbatches pipeline active_microbatches offload_activations placement_strategy".split()
)

_GB = 1e9


@dataclass(frozen=True)
class ScriptSuggestion(Shown):
    """The result of a search over rehearsals of a script; ``print`` and a notebook show it as a table.

    Attributes:
        found: the rehearsed configurations, the best one, and whether a better one may have been missed.
        given: settings that were not searched, such as the precision.
        space: the searched configurations.
        cluster: in words.
        usd_per_hour: of all instances; None if no price is known.
        changes: single changes of the given settings that help, best first: the change, and its result.
        before: the result of the given settings; None if they had no degrees.
    """

    found: Found
    given: Mapping[str, Any]
    space: Space
    cluster: str
    usd_per_hour: float | None = None
    changes: tuple[tuple[str, Judged], ...] = ()
    before: Judged | None = None

    @property
    def best(self) -> Judged | None:
        """Return the fastest configuration that fits, or None if no rehearsed one fits."""
        return self.found.best

    @property
    def verdict(self) -> Verdict:
        """Return the verdict of the best configuration."""
        return Verdict.DOES_NOT_FIT if self.best is None else Verdict.FITS

    @property
    def parameters(self) -> dict[str, Any]:
        """Return ``mp_parameters`` of the best or the nearest configuration; empty if nothing could be rehearsed."""
        chosen = self.best or self.found.nearest
        return {} if chosen is None else {**self.given, **chosen.configuration.settings()}

    @property
    def batch(self) -> int | None:
        """Return the script's batch size with these parameters."""
        chosen = self.best or self.found.nearest
        return None if chosen is None else self.space.batch(chosen.configuration)

    def usd_per_step(self, judged: Judged) -> float | None:
        """Return the price of the instances for one step, or None if its time or the price is not known."""
        seconds = judged.evaluated.seconds
        return None if self.usd_per_hour is None or seconds is None else self.usd_per_hour * seconds / 3600

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers by name: seconds, bytes, US dollars."""
        return {
            "cluster": self.cluster,
            "global_batch": self.space.samples,
            "parameters": self.parameters,
            "batch": self.batch,
            "fits": self.best is not None,
            "search": search_dict(self.found),
            "rehearsed": [
                {
                    "parameters": {**self.given, **one.configuration.settings()},
                    "batch": self.space.batch(one.configuration),
                    "seconds_per_step": one.evaluated.seconds,
                    "peak_bytes": one.evaluated.peak_bytes,
                    "fits": one.evaluated.fits,
                    "why": one.evaluated.why,
                    "usd_per_step": self.usd_per_step(one),
                }
                for one in self.found.judged
            ],
            "changes": [
                {"what": what, "seconds_per_step": one.evaluated.seconds, "parameters": one.configuration.settings()}
                for what, one in self.changes
            ],
        }

    def report(self) -> Report:
        """Return the rehearsals in order, and the choice."""
        rows: list[list[Cell]] = []
        for one in self.found.judged:
            seen, price = one.evaluated, self.usd_per_step(one)
            mark = " ← chosen" if self.best is not None and one.configuration == self.best.configuration else ""
            verdict = Verdict.FITS if seen.fits else Verdict.DOES_NOT_FIT
            rows.append(
                [
                    str(one.configuration),
                    str(self.space.batch(one.configuration)),
                    "" if seen.peak_bytes is None else f"{seen.peak_bytes / _GB:.1f} GB",
                    "" if seen.seconds is None else f"{seen.seconds:.3g} s",
                    "" if price is None else f"{price:.3g}",
                    ColouredText(f"fits{mark}" if seen.fits else seen.why, verdict),
                ]
            )
        columns = ["configuration", "batch", "peak", "step", "USD per step", "verdict"]
        lines: list[tuple[str, Sequence[Cell]]] = [("searched", [search_line(self.found)])]
        if self.best is None:
            lines.append(("verdict", [ColouredText("nothing that was rehearsed fits", Verdict.DOES_NOT_FIT)]))
        if self.before is not None:
            said = [self._change(what, judged) for what, judged in self.changes[:3]]
            none = "of what was given, none makes a step shorter"
            if not self.found.is_proven:
                none = "of what was given: the budget ended before one was found that makes a step shorter"
            lines.append(("one change", said or [none]))
        lines += [("parameters", [str(self.parameters)]), ("script", [f"batch {self.batch}"])]
        title = f"rehearsed on {self.cluster}, {self.space.samples} samples per step"
        return [Grid(columns, rows, frozenset({1, 2, 3, 4}), title=title), Lines(lines)]

    def _change(self, what: str, judged: Judged) -> str:
        before = None if self.before is None or not self.before.evaluated.fits else self.before.evaluated.seconds
        return change_line(what, judged.evaluated.seconds, before)


def suggest_for_script(  # noqa: PLR0913 - most have defaults, and each is an option of the command
    script: str | os.PathLike[str],
    arguments: Sequence[str],
    *,
    instance_type: str,
    instance_count: int,
    global_batch: int,
    parameters: Mapping[str, Any] | None = None,
    processes_per_host: int | None = None,
    gpu_memory_bytes: int | None = None,
    tensor_parallelism: bool = False,
    usd_per_hour: float | None = None,
    budget: float = BUDGET_SECONDS,
    tell: Callable[[str], None] = lambda _: None,
    run: Callable[..., Rehearsed] | None = None,
) -> ScriptSuggestion:
    """Search the degrees that train a script fastest on a cluster, by rehearsing it.

    The search covers pipeline, tensor and sharding degrees, sharded optimizer state, microbatches, active microbatches, the
    pipeline's schedule and the placement. It covers offloading only if the script checkpoints activations, which the script
    itself decides.

    Args:
        script: as a job runs it; it takes its degrees from ``mp_parameters``.
        arguments: its command line; ``{batch}`` is replaced by the batch size, which follows from the degrees.
        instance_type: such as ``"ml.p4d.24xlarge"``.
        instance_count: instances.
        global_batch: samples of an optimizer step at any degrees.
        parameters: ``mp_parameters``. The searched ones are replaced, the others are kept. If degrees are given, single
            changes of them are tried too.
        processes_per_host: ranks of an instance; default: its GPUs.
        gpu_memory_bytes: of one GPU; default: the catalogue's.
        tensor_parallelism: the script has modules that tensor parallelism distributes.
        usd_per_hour: of one instance; default: the catalogue's.
        budget: seconds after which no further rehearsal starts.
        tell: called with a line of text after each rehearsal.
        run: rehearses; default: :func:`~smp_estimator.rehearsal.rehearse.rehearse`.

    Raises:
        ConfigError: settings that cannot work, arguments without ``{batch}``, an instance without known rates.
        RehearsalFailed: the script cannot be rehearsed on one GPU either.
    """
    known = require_usable(instance_type) or instance(instance_type)
    if not any(BATCH in argument for argument in arguments):
        raise ConfigError(
            f"none of the script's arguments has {BATCH} in it ({' '.join(arguments) or 'there are none'}); with other degrees "
            f"each rank reads another batch, so that the global batch stays {global_batch}: write for example --batch-size {BATCH}",
            code="SMP120",
        )
    card = RateCard.of_instance(instance_type, processes_per_host=processes_per_host, usd_per_hour=usd_per_hour)
    per_host, memory = card.gpus_per_host, gpu_memory_bytes or gpu_memory_of(instance_type)
    refuse_version_2(parameters, "a search for degrees", Path(script))
    given = {"ddp": True, **(parameters or {})}
    settings = ModelParallelParameters.from_mp_parameters(given)
    refuse_pieces(settings)
    kept = {name: value for name, value in given.items() if name not in _CHOSEN}
    schedules: tuple[str, ...] = DOCUMENTED
    if not TRAITS[settings.pipeline].trains:  # says what the job is for
        kept["pipeline"], schedules = settings.pipeline, (settings.pipeline,)
    rehearsal = _Rehearsals(
        script, tuple(arguments), instance_type, instance_count, per_host, memory, kept, tell, run or rehearse
    )
    alone = rehearsal.alone(max(1, global_batch // (per_host * instance_count)))
    space = Space(
        world=per_host * instance_count,
        per_host=per_host,
        samples=global_batch,
        layers=alone.layers,
        heads=per_host if tensor_parallelism else 0,
        memories=("again",) if alone.checkpoints else ("kept",),
        schedules=schedules,
    )
    region = SearchRegion(
        space=space,
        needs=alone.needs(card),
        card=card,
        evaluate=lambda at: rehearsal.judge(at, space),
        device_bytes=None if memory is None else TIGHT_ABOVE * memory,
        name=f"{instance_count} × {instance_type}",
    )
    search = Search([region], budget=budget, gap=_GAP)
    start = configuration_of_settings(settings, space.memories[0]) if _CHOSEN & given.keys() else None
    # The rest of the budget is for single changes of the script's own settings.
    part = 1.0 if start is None else _OF_THE_BEST
    found = search.run([] if start is None else [start], part)
    if found.best is None and found.is_proven and alone.checkpoints:  # nothing fits on the GPUs alone
        space = dataclasses.replace(space, memories=("again", "offloaded"))
        search = Search([dataclasses.replace(region, space=space)], budget=budget, gap=_GAP)
        found = search.run([one.configuration for one in found.judged], part)
    changes: tuple[tuple[str, Judged], ...] = ()
    if start is not None:
        changes = tuple((change_words(name, start, one.configuration), one) for name, one in search.changes(start))
        found = search.run([start])  # with what the changes have shown; nothing is rehearsed twice
    price = card.usd_per_hour if known is not None or usd_per_hour else None
    return ScriptSuggestion(
        found=found,
        given=kept,
        space=space,
        cluster=region.name,
        usd_per_hour=None if price is None else price * instance_count,
        changes=changes,
        before=None if start is None else search.judge(start),
    )


@dataclass(frozen=True)
class _Rehearsals:
    """A script's rehearsals on one cluster."""

    script: str | os.PathLike[str]
    arguments: tuple[str, ...]
    instance_type: str
    instance_count: int
    per_host: int
    memory: int | None
    kept: Mapping[str, Any]
    tell: Callable[[str], None] = field(repr=False)
    run: Callable[..., Rehearsed] = field(repr=False)
    known: dict[Configuration, Evaluated] = field(default_factory=dict, repr=False)

    def alone(self, batch: int) -> Alone:
        """Rehearse the script on one GPU, with this batch and with twice this batch."""
        sizes = batch, 2 * batch
        one, other = (self._rehearse(1, 1, {}, size).rehearsal.kinds[0] for size in sizes)
        peaks = (
            f"{on_gpu(kind) / _GB:.1f} GB with a batch of {size}"
            for kind, size in zip((one, other), sizes, strict=True)
        )
        self.tell(f"one GPU: {one.parameters:,} parameters, {' and '.join(peaks)}")
        return Alone(sizes, (one, other))

    def judge(self, at: Configuration, space: Space) -> Evaluated:
        """Rehearse a configuration once. If that fails, the configuration does not fit; the result has the reason."""
        if at not in self.known:
            self.known[at] = self._judged(at, space)
        return self.known[at]

    def _judged(self, at: Configuration, space: Space) -> Evaluated:
        try:
            space.check(at)
            found = self._rehearse(self.instance_count, self.per_host, at.settings(), space.batch(at))
        except (ConfigError, RehearsalFailed) as error:
            self.tell(f"{at}: {error}")
            return Evaluated(None, None, False, str(error).splitlines()[0])
        seconds = found.rehearsal.step_seconds
        peak = on_gpu(found.fullest)
        fits = found.verdict in (Verdict.FITS, Verdict.UNKNOWN)
        self.tell(f"{at}: {seconds:.3g} s, {peak / _GB:.1f} GB, {found.verdict.value}")
        why = "" if fits else f"{found.verdict.value}: {peak / _GB:.1f} GB on stage {found.fullest.stage}"
        planned = next((kind for kind in found.rehearsal.kinds if kind.pipeline_seconds), None)
        passing = None if planned is None else planned.pipeline_runs * (planned.pipeline_seconds or 0.0)
        return Evaluated(seconds, peak, fits, why, passing)

    def _rehearse(self, hosts: int, per_host: int, settings: Mapping[str, Any], batch: int) -> Rehearsed:
        return self.run(
            self.script,
            [argument.replace(BATCH, str(batch)) for argument in self.arguments],
            instance_type=self.instance_type,
            instance_count=hosts,
            processes_per_host=per_host,
            parameters={**self.kept, **settings},
            gpu_memory_bytes=self.memory,
            other_ranks=False,  # of the same script, the degrees change nothing
        )
