"""The result of a rehearsal: whether every stage fits, the owners of its memory, and the traffic between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from smp_config.error_codes import Coded
from smp_config.machine.instances import GIB, instance
from smp_estimator.planning.forecast import TIGHT_ABOVE, Verdict
from smp_estimator.planning.report import Cell, ColouredText, Grid, Lines, Report, Shown
from smp_estimator.planning.timing.goodput import Goodput, JobFailures, goodput
from smp_estimator.rehearsal.curves import memory_curves, partition_of
from smp_estimator.timeline.memory_figure import memory_areas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smp_records.rehearsal import Failure, KindReport, Rehearsal

#: Holders of the fullest stage that are shown.
_SHOWN_HOLDERS = 6

#: Modules of an unused stage that are named.
_SHOWN_MODULES = 4


class RehearsalFailed(Coded, RuntimeError):
    """The script fails in its rehearsal, or cannot be rehearsed.

    Attributes:
        failures: of each kind of rank that reported an error, the first cause first.
    """

    code = "SMP120"

    def __init__(self, message: str, failures: tuple[Failure, ...] = ()) -> None:
        super().__init__(message)
        self.failures = failures


@dataclass(frozen=True)
class Rehearsed(Shown):
    """A rehearsal with its verdict; ``print(rehearsed)`` and a notebook show it as tables.

    Attributes:
        rehearsal: all that was counted.
        gpu_memory_bytes: of one GPU; None if it is not known.
        training_steps: of the whole training; None if they were not given.
        training_epochs: the same as passes through the data; None if they were not given.
    """

    rehearsal: Rehearsal
    gpu_memory_bytes: int | None
    training_steps: int | None = None
    training_epochs: float | None = None

    @cached_property
    def fullest(self) -> KindReport:
        """Return the kind of rank that uses the most GPU memory."""
        return max(self.rehearsal.kinds, key=on_gpu)

    @property
    def fraction(self) -> float | None:
        """Return the part of a GPU's memory that the fullest stage needs, or None if its size is not known."""
        return None if self.gpu_memory_bytes is None else on_gpu(self.fullest) / self.gpu_memory_bytes

    @property
    def verdict(self) -> Verdict:
        """Return whether every stage fits, by the limits of a plan.

        The driver, NCCL and fragmentation need a part of the memory too.
        """
        return self.verdict_of(self.fullest)

    def verdict_of(self, kind: KindReport) -> Verdict:
        """Return whether one stage fits."""
        if self.gpu_memory_bytes is None:
            return Verdict.UNKNOWN
        part = on_gpu(kind) / self.gpu_memory_bytes
        if part > 1:
            return Verdict.DOES_NOT_FIT
        return Verdict.TIGHT if part > TIGHT_ABOVE else Verdict.FITS

    @property
    def unused(self) -> list[KindReport]:
        """Return the stages without a parameter that a step uses: their GPUs have almost no work."""
        return [one for one in self.rehearsal.kinds if one.parameters <= one.idle_parameters]

    @property
    def training_hours(self) -> float | None:
        """Return the hours of the whole training, or None if the number of its steps or the rates are not known."""
        seconds = self.rehearsal.step_seconds
        return None if self.training_steps is None or not seconds else self.training_steps * seconds / 3600

    @property
    def training_usd(self) -> float | None:
        """Return the price of the whole training, as EC2 bills the instances, or None if its hours or the price are not known."""
        known = instance(self.rehearsal.request.instance_type or "")
        if self.training_hours is None or known is None or known.usd_per_hour is None:
            return None
        return self.training_hours * known.usd_per_hour * self.rehearsal.request.hosts

    @cached_property
    def goodput(self) -> Goodput | None:
        """Return the hours and price with failures at the rate of a published training; None if the hours are not known."""
        if not self.training_hours:
            return None
        request, classes = self.rehearsal.request, self.fullest.classes
        saved = classes.get("parameter", 0) + classes.get("optimizer state", 0)
        known = instance(request.instance_type or "")
        price = None
        if known is not None and known.usd_per_hour is not None:
            price = known.usd_per_hour * request.hosts
        failures = JobFailures.of_job(request.ranks, saved)
        return goodput(3600 * self.training_hours, failures, usd_per_hour=price)

    def to_dict(self) -> dict[str, object]:
        """Return all figures for JSON.

        They are the fields of :class:`~smp_records.rehearsal.Rehearsal`, and under ``found`` the results derived from them.
        """
        found = self.rehearsal
        return {
            **found.model_dump(mode="json"),
            "found": {
                "verdict": self.verdict.name.lower(),
                "gpu_memory_bytes": self.gpu_memory_bytes,
                "fullest_stage": self.fullest.stage,
                "on_gpu_bytes": {str(kind.stage): on_gpu(kind) for kind in found.kinds},
                "most_bytes": {str(kind.stage): self._most_on_gpu(kind) for kind in found.kinds},
                "unused_stages": [kind.stage for kind in self.unused],
                "step_seconds": found.step_seconds,
                "samples_per_second": found.samples_per_second,
                "training_steps": self.training_steps,
                "training_epochs": self.training_epochs,
                "training_hours": self.training_hours,
                "training_usd": self.training_usd,
                "goodput": None if self.goodput is None else self.goodput.to_dict(),
            },
        }

    def _basis(self) -> str:
        """Return, in words, the rates or measurements that a step's seconds are based on."""
        card = self.rehearsal.request.rates
        if card is None:
            return "the instance's stated rates"
        by_rates = f"the rates of {card.name}"
        parts = [one.measured_seconds / one.step_seconds for one in self.rehearsal.kinds if one.step_seconds]
        if not card.measured or not parts:
            return by_rates
        return f"measured durations ({max(parts):.0%}) and {by_rates}"

    def _speed(self) -> str:
        samples = self.rehearsal.samples_per_second
        return "" if samples is None else f", {samples:,.4g} samples per second"

    def _idle(self) -> str:
        planned = [one.pipeline_idle for one in self.rehearsal.kinds if one.pipeline_idle]
        if not planned:
            return ""
        idle = planned[0]
        shares = ", ".join(f"{idle[stage]:.0%}" for stage in sorted(idle))
        return f"; of the pipeline's planned order, stages are idle {shares}"

    def _repr_html_(self) -> str:
        """Return the tables, the memory of each stage over a step, and the modules of each stage."""
        shown: str = super()._repr_html_()
        if curves := memory_curves(self.rehearsal.kinds, self.gpu_memory_bytes):
            shown += memory_areas("Memory of a rank over a step", curves)
        if len(self.rehearsal.kinds) > 1:
            shown += partition_of(self.rehearsal.kinds)._repr_html_()
        return shown

    def report(self) -> Report:
        """Return the parts of the printed report."""
        found = self.rehearsal
        request = found.request
        kind = self.fullest
        where = f"{request.hosts} × {request.instance_type or 'host'}, {request.ranks} ranks"
        at = kind.peak_module or kind.peak_line
        verdict = self.verdict
        share = "" if self.fraction is None else f", {self.fraction:.0%} of {_size(self.gpu_memory_bytes or 0)}"
        fullest = (
            f"stage {kind.stage} holds {_size(on_gpu(kind))}{share}, in {kind.peak_phase}{f' at {at}' if at else ''}"
        )
        lines: list[tuple[str, Sequence[Cell]]] = [
            ("verdict", [ColouredText(verdict.value, verdict), fullest]),
            *self._other_order(),
            *self._reserved(),
            *self._offloaded(),
            ("rehearsed", [f"{where}: {_kinds(len(found.kinds))} in {found.seconds:.0f} s"]),
        ]
        if found.step_seconds:
            lines.append(("step", [f"{found.step_seconds:.3g} s by {self._basis()}{self._speed()}{self._idle()}"]))
        if self.training_hours is not None:
            passes = self.training_epochs
            plural = "" if passes == 1 else "s"
            epochs = "" if passes is None else f" ({passes:g} epoch{plural})"
            price = "" if self.training_usd is None else f", {_dollars(self.training_usd)} USD at EC2's on-demand price"
            lines.append(
                ("training", [f"{self.training_steps:,} steps{epochs} take {_hours(self.training_hours)}{price}"])
            )
        if self.goodput is not None:
            lines.append(("with failures", [str(self.goodput)]))
        lines += [("unused", [_why_unused(one)]) for one in self.unused]
        for one in self.rehearsal.kinds:
            if one.idle_modules and one not in self.unused:
                names = _names(one.idle_modules)
                lines.append(
                    ("unused", [f"no step calls {names} of stage {one.stage} ({one.idle_parameters:,} parameters)"])
                )
        parts: list[Lines | Grid] = [Lines(lines), self._stages(), self._holders(kind)]
        if traffic := self._traffic(kind):
            parts.append(traffic)
        return parts

    def _reserved(self) -> list[tuple[str, Sequence[Cell]]]:
        """Return a line about what PyTorch's allocator reserves on the GPU that reserves most."""
        most = max(kind.reserved_bytes for kind in self.rehearsal.kinds)
        if not most:
            return []
        kind = next(kind for kind in self.rehearsal.kinds if kind.reserved_bytes == most)
        words = f"{_size(most)} by PyTorch's allocator on stage {kind.stage}, with the fragments of segments; streams not counted"
        return [("reserved", [words])]

    def _other_order(self) -> list[tuple[str, Sequence[Cell]]]:
        """Return a line about the peak memory if the job's microbatches run in a less favorable order."""
        kind = max(self.rehearsal.kinds, key=self._most_on_gpu)
        most = self._most_on_gpu(kind)
        if most <= on_gpu(self.fullest):
            return []
        words = f"{_size(most)} on stage {kind.stage} if all {kind.active_microbatches} active microbatches are in flight there"
        return [("at most", [words])]

    def _offloaded(self) -> list[tuple[str, Sequence[Cell]]]:
        kind = max(self.rehearsal.kinds, key=lambda one: one.host_peak_bytes)
        if not kind.host_peak_bytes:
            return []
        return [("offloaded", [f"{_size(kind.host_peak_bytes)} in main memory, of each rank of stage {kind.stage}"])]

    def _most_on_gpu(self, kind: KindReport) -> int:
        return self.rehearsal.most_bytes(kind) - (kind.peak_bytes - on_gpu(kind))

    def _stages(self) -> Grid:
        kinds = list(dict.fromkeys(name for one in self.rehearsal.kinds for name in one.classes))
        rows: list[list[Cell]] = []
        for one in self.rehearsal.kinds:
            sizes = [_size(one.classes.get(name, 0)) for name in kinds]
            peak = ColouredText(_size(on_gpu(one)), self.verdict_of(one))
            place = f"{one.peak_phase} {one.peak_module}".strip()
            rows.append([str(one.stage), str(one.stands_for), f"{one.parameters:,}", *sizes, peak, place])
        columns = ["stage", "ranks", "parameters", *kinds, "peak", "at"]
        return Grid(columns, rows, numbers=frozenset(range(len(columns) - 1)), title="Memory of a rank at its peak")

    def _holders(self, kind: KindReport) -> Grid:
        rows = [
            [
                holder.kind,
                holder.module or "–",
                holder.phase,
                holder.operation.partition(".")[0],
                f"{holder.count:,}",
                _size(holder.bytes),
            ]
            for holder in kind.holders[:_SHOWN_HOLDERS]
        ]
        columns = ["kind", "module", "made in", "by", "tensors", "bytes"]
        return Grid(columns, rows, numbers=frozenset({4, 5}), title=f"Who holds the peak of stage {kind.stage}")

    def _traffic(self, kind: KindReport) -> Grid | None:
        last = kind.steps - 1
        rows = [
            [
                one.kind,
                one.group,
                str(one.ranks),
                str(one.hosts),
                one.phase,
                f"{one.calls:,}",
                _size(one.payload_bytes),
                _size(one.sent_bytes),
            ]
            for one in kind.collectives
            if one.step == last
        ]
        rows += [
            [
                "message",
                f"stage {one.stage}",
                "2",
                "1" if one.same_host else "2",
                "",
                f"{one.messages:,}",
                _size(one.tensor_bytes),
                _size(one.tensor_bytes),
            ]
            for one in kind.links
            if one.step == last
        ]
        if not rows:
            return None
        columns = ["collective", "group", "ranks", "hosts", "phase", "calls", "tensors", "sent"]
        return Grid(
            columns,
            rows,
            numbers=frozenset({2, 3, 5, 6, 7}),
            title=f"What a rank of stage {kind.stage} sends in a step",
        )


def _why_unused(kind: KindReport) -> str:
    """Describe why a stage is unused, and the change that helps."""
    change = "lower pipeline_parallel_degree, or move modules there"
    if kind.parameters:
        return (
            f"stage {kind.stage} holds {_names(kind.idle_modules)}, which no step calls, and nothing else with parameters; take "
            f"what is not trained out of the model, {change}"
        )
    held = (
        f"holds no parameters, only {_names(kind.modules)}" if kind.modules else "holds no parameters, and no modules"
    )
    return f"stage {kind.stage} {held}; {change}"


def _names(paths: Sequence[str]) -> str:
    """Return the first paths, and the number of the others."""
    more = len(paths) - _SHOWN_MODULES
    return ", ".join(paths[:_SHOWN_MODULES]) + (f" and {more} more" if more > 0 else "")


def _kinds(number: int) -> str:
    return f"{number} kinds of ranks" if number > 1 else "1 kind of rank"


def _hours(hours: float) -> str:
    """Format hours, or minutes or seconds for a short training."""
    if hours >= 1:
        return f"{hours:,.1f} h"
    minutes = hours * 60
    if minutes < 1:
        return f"{minutes * 60:,.2g} s"
    return f"{minutes:,.2g} min" if minutes < 10 else f"{minutes:,.0f} min"


def _dollars(price: float) -> str:
    """Format a price in whole dollars, or with cents if it is small."""
    if price >= 100:
        return f"{price:,.0f}"
    return f"{price:,.2f}" if price >= 0.01 else "less than 0.01"


def on_gpu(kind: KindReport) -> int:
    """Return the bytes at the peak without the script's data in host memory, which is made outside steps."""
    return kind.peak_bytes - kind.classes.get("other", 0)


def gpu_memory_of(instance_type: str | None) -> int | None:
    """Return the memory of a GPU of an instance type, or None if the catalogue does not have it."""
    known = instance(instance_type) if instance_type else None
    return None if known is None else known.gpu_memory_bytes


def _size(nbytes: float) -> str:
    if nbytes >= 0.1 * GIB:
        return f"{nbytes / GIB:,.2f} GiB"
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes >= 0.1 * 2**20 else f"{nbytes / 2**10:,.1f} KiB"
