"""Rates at which a GPU of a job computes and sends: the one place where work and bytes become seconds.

The plan of a job and its rehearsal both ask here. Work takes the longer of its operations and of the bytes that it
moves in the GPU's memory (the roofline: Williams, Waterman and Patterson 2009), and a kernel's launch. Bytes between
ranks take latency and bytes ÷ rate (Hockney 1994), by the arithmetic of rings and trees (:func:`sent_bytes`; Patarasuk
and Yuan 2009). A collective over several hosts is a ring through them. Its channels leave a host by all of its GPUs,
as NCCL lays it out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from smp_config.errors import ConfigError, show_value, suggest
from smp_config.machine.instances import instance, refuse_neuron
from smp_records.timeline import FILE_PREFIX, FILE_SUFFIX, TIMELINE_VARIABLE, Kind, RankTimeline, parse_timeline

#: Raised when cards of an older version could be misread.
FORMAT_VERSION = 1

#: A collective by its name.
CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "barrier"
]
COLLECTIVE_KINDS: tuple[str, ...] = get_args(CollectiveKind)

#: The subject of a measured duration: a module's forward or backward pass, or the step function's own code.
Phase = Literal["forward", "backward", "step"]

#: Part of the peak that large matrices reach. With elementwise work counted for itself, a layer of a transformer then comes
#: to 44–52 % of the peak, which Narayanan et al. 2021 measured on A100 with everything included.
MATRIX_PART = 0.7

#: Part of the published memory bandwidth that elementwise work reaches; an assumption, near what STREAM reaches.
MEMORY_PART = 0.85

#: Seconds that a kernel takes however little it does: an assumption for PyTorch without graphs.
LAUNCH_SECONDS = 5e-6

#: Seconds of one step of a ring or tree: NCCL's own model (``hwLatencies`` in ``src/graph/tuning.cc`` at 5067397, protocol
#: "Simple" of a ring), by what carries it.
NVLINK_LATENCY, PCIE_LATENCY, NETWORK_LATENCY = 3.4e-6, 5.7e-6, 14e-6

#: Names of types as ``mp_parameters`` has them.
_SHORT_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

#: Phase of each kind of action in a timeline.
_PHASES: Mapping[Kind, Phase] = {"F": "forward", "B": "backward", "S": "step"}

_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Part = Annotated[float, Field(gt=0, le=1)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Link(BaseModel):
    """A way between two GPUs, or between a GPU and its host.

    Attributes:
        bytes_per_second: of one GPU in one direction while all GPUs of the host send.
        latency: seconds until the first byte has come.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes_per_second: _Rate
    latency: _Seconds = 0.0

    def seconds(self, sent: float) -> float:
        """Return the latency plus the time of ``sent`` bytes, in seconds."""
        return self.latency + sent / self.bytes_per_second


class Measured(BaseModel):
    """The recorded time of a module for one microbatch.

    Attributes:
        path: path of the module, such as ``"transformer.h.3"``; ``""`` for the step function's own code.
        phase: ``"forward"``, ``"backward"``, or ``"step"`` for the step function's own code.
        seconds: the median over the microbatches of all training steps.
        count: number of microbatches that the median covers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    phase: Phase
    seconds: _Seconds
    count: int = Field(ge=1)


class RateCard(BaseModel):
    """Rates of one GPU of a cluster, and of its links to others; every figure can be given, and written as JSON.

    Attributes:
        version: version of the format.
        name: name of the GPU, or of another device that computes.
        device_bytes: memory of a GPU, in bytes; None if it is not known.
        gpus_per_host: GPUs of a host that take part in the job.
        flops_per_second: peak by type, ``"float32"``, ``"float16"``, ``"bfloat16"``; a type that is not here has the peak of
            ``"float32"``. A multiplication and an addition are two operations.
        matrix_part: part of that peak that is reached.
        attention_part: part of the peak of ``"bfloat16"`` that causal attention reaches, for plans; None: not measured.
        memory_bytes_per_second: peak of the GPU's memory, bytes read and bytes written together.
        memory_part: part of that peak that is reached.
        launch_seconds: seconds that a kernel takes beside its work.
        inside: link from a GPU to another of its host; None: there is one GPU.
        between: link from a GPU to one of another host; None: there is one host, or no rate is known.
        host: link from a GPU to its host's memory, as offloading copies.
        usd_per_hour: price of one host; None if no price is known.
        sources: sources of the figures, in words.
        measured: durations that replace the roofline.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = FORMAT_VERSION
    name: str
    device_bytes: int | None = Field(default=None, gt=0)
    gpus_per_host: int = Field(default=1, ge=1)
    flops_per_second: Mapping[str, _Rate]
    matrix_part: _Part = MATRIX_PART
    attention_part: _Part | None = None
    memory_bytes_per_second: _Rate
    memory_part: _Part = MEMORY_PART
    launch_seconds: _Seconds = LAUNCH_SECONDS
    inside: Link | None = None
    between: Link | None = None
    host: Link
    usd_per_hour: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    sources: tuple[str, ...] = ()
    measured: tuple[Measured, ...] = ()

    @classmethod
    def of_instance(
        cls,
        instance_type: str,
        *,
        processes_per_host: int | None = None,
        matrix_part: float = MATRIX_PART,
        usd_per_hour: float | None = None,
    ) -> RateCard:
        """Return the card of an instance type, from the catalogues of instances and GPUs.

        Args:
            instance_type: such as ``"ml.p4d.24xlarge"``.
            processes_per_host: processes that share the host's network; default: its number of GPUs.
            matrix_part: part of the GPU's peak that matrices reach.
            usd_per_hour: price of one instance; default: the catalogue's, which is EC2's.

        Raises:
            ConfigError: the catalogue lacks the type, or the maker of its GPU publishes no figures.
        """
        refuse_neuron(str(instance_type))
        known = instance(instance_type)
        if known is None:
            raise ConfigError(
                f"instance_type {show_value(instance_type)} is not in the catalogue of GPU instances, so its rates are "
                "unknown; use one "
                "of smp_estimator.planning.instances(), or write a rate card of your own",
                code="SMP110",
            )
        facts, memory = known.gpu_facts, known.memory_gb_per_s
        if memory is None or facts.fp32_tflops is None:
            raise ConfigError(
                f"no peak of the {known.gpu} of {known.name} is published ({facts.source}), so no time can be computed; use "
                "another instance type, or write a rate card of your own",
                code="SMP110",
            )
        processes = processes_per_host or known.gpus
        network = None
        if known.network_baseline_gbps is not None:
            rate = known.network_baseline_gbps * 1e9 / 8 / processes
            network = Link(bytes_per_second=rate, latency=NETWORK_LATENCY)
        link = Link(
            bytes_per_second=known.link_gb_per_s * 1e9, latency=NVLINK_LATENCY if known.nvlink else PCIE_LATENCY
        )
        return cls(
            name=f"{known.gpu} of {known.name}",
            device_bytes=known.gpu_memory_bytes,
            gpus_per_host=processes,
            flops_per_second={
                long: 1e12 * (facts.tflops(short) or facts.fp32_tflops) for short, long in _SHORT_NAMES.items()
            },
            matrix_part=matrix_part,
            memory_bytes_per_second=memory * 1e9,
            inside=link if processes > 1 else None,
            between=network,
            host=Link(bytes_per_second=facts.pcie_gb_per_s * 1e9, latency=PCIE_LATENCY),
            usd_per_hour=usd_per_hour or known.usd_per_hour,
            sources=(
                f"peaks and links: {facts.source}",
                f"network: {known.source}",
                f"{matrix_part:.0%} of the arithmetic peak and {MEMORY_PART:.0%} of the memory's are assumed, and "
                f"{LAUNCH_SECONDS * 1e6:g} µs of a launch",
                "latencies: NCCL's own cost model, src/graph/tuning.cc at 5067397",
            ),
        )

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "the rate card") -> RateCard:
        """Read a card that :meth:`to_json` wrote, or that was written by hand.

        Args:
            where: its name, for messages.

        Raises:
            ConfigError: it is broken, or its version is newer than this one.
        """
        try:
            found = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            known = suggest(str(first["loc"][-1]), cls.model_fields) if first["type"] == "extra_forbidden" else ""
            raise ConfigError(
                f"{where} is no rate card: {first['msg']}{f' at {place}' if place else ''}{known}; rates are in bytes, operations "
                "and seconds, each more than 0: mend it, or leave it out for the rates of the instance",
                code="SMP110",
            ) from None
        if found.version > FORMAT_VERSION:
            raise ConfigError(
                f"{where} has format {found.version}, this package reads up to {FORMAT_VERSION}; a newer version wrote it: read it "
                "with that one (pip install --upgrade smp-estimator)",
                code="SMP110",
            )
        return found

    def to_json(self) -> str:
        """Return the card as JSON, by the names of its attributes; :meth:`from_json` reads it."""
        return self.model_dump_json(indent=2)

    def seconds_of_work(self, flops: float, moved: float, dtype: str) -> float:
        """Return the seconds of one kernel: the longer of operations and memory, and its launch.

        Args:
            flops: floating point operations, a multiplication and an addition being two.
            moved: bytes read and written in the GPU's memory.
            dtype: of the operands: ``"bfloat16"``, ``"torch.bfloat16"`` or ``"bf16"``.
        """
        name = dtype.removeprefix("torch.")
        rates = self.flops_per_second
        peak = rates.get(_SHORT_NAMES.get(name, name)) or rates.get("float32") or max(rates.values())
        arithmetic = flops / (self.matrix_part * peak)
        return max(arithmetic, moved / (self.memory_part * self.memory_bytes_per_second)) + self.launch_seconds

    def seconds_of_collective(self, kind: str, size: float, ranks: int, hosts: int) -> float:
        """Return the seconds of one collective that nothing else delays.

        Args:
            kind: one of :data:`COLLECTIVE_KINDS`.
            size: bytes of the whole: of an all-gather what each rank gets, of a reduce-scatter what each puts in, of an
                all-reduce, broadcast or reduce the tensor, of an all-to-all what one rank puts in.
            ranks: of the group.
            hosts: that the group lies on, with as many ranks on each.

        Raises:
            ConfigError: an unknown kind, or a link that the card has no rate for.
        """
        if kind not in COLLECTIVE_KINDS:
            raise ConfigError(
                f"the collective is {show_value(kind)}{suggest(str(kind), COLLECTIVE_KINDS)}; its time is computed by its "
                "kind: use one "
                f"of {', '.join(COLLECTIVE_KINDS)}",
                code="SMP110",
            )
        if ranks < 2:
            return 0.0
        on_host = -(-ranks // max(1, hosts))
        latency = self._latency(kind, on_host, hosts)
        if kind in ("all_to_all", "gather", "scatter"):
            # No ring: each byte goes straight to its place, and what leaves a host does so by the one GPU that has it.
            inside = self._inside((on_host - 1) / ranks * size) if on_host > 1 else 0.0
            return latency + max(inside, self._between((ranks - on_host) / ranks * size) if hosts > 1 else 0.0)
        return latency + self.seconds_of_traffic(sent_bytes(kind, ranks, size), on_host, hosts)

    def seconds_of_exchange(self, sent: float, ranks: int, hosts: int) -> float:
        """Return the seconds of an exchange in which each rank of a group sends ``sent`` bytes in all to some of the others.

        Over all exchanges of a ring, or of one all-to-all, each of the others gets as much. So the links between hosts carry
        their part of it.

        Raises:
            ConfigError: a link that the card has no rate for.
        """
        if ranks < 2:
            return 0.0
        return self.seconds_of_collective("all_to_all", sent * ranks / (ranks - 1), ranks, hosts)

    def seconds_of_traffic(self, sent: float, on_host: int, hosts: int) -> float:
        """Return the seconds in which each rank of a ring sends ``sent`` bytes to its neighbour, without latency.

        Inside a host every rank has a link of its own. A ring through several hosts leaves each of them once, by the
        network's share of all its ``on_host`` members there.

        Raises:
            ConfigError: a link that the card has no rate for.
        """
        if not sent:
            return 0.0
        seconds = self._inside(sent) if on_host > 1 else 0.0
        return max(seconds, self._between(sent / on_host)) if hosts > 1 else seconds

    def seconds_of_message(self, size: float, same_host: bool) -> float:
        """Return the seconds from the sending of ``size`` bytes until another rank has them all.

        Raises:
            ConfigError: a link that the card has no rate for.
        """
        return self._link(inside=same_host).seconds(size)

    def seconds_of_copy(self, size: float) -> float:
        """Return the seconds of a copy of ``size`` bytes between a GPU and its host's memory, in one direction."""
        return self.host.seconds(size)

    def seconds_of_module(self, path: str, phase: str) -> float | None:
        """Return the measured seconds of a module for one microbatch, or None if none were measured.

        Args:
            path: path of the module; ``""`` for the step function's own code.
            phase: ``"forward"``, ``"backward"`` or ``"step"``.
        """
        return next((each.seconds for each in self.measured if (each.path, each.phase) == (path, phase)), None)

    def with_measured(self, file: str | Path) -> RateCard:
        """Return the same card with durations that a job recorded, in place of its own.

        Args:
            file: a rank's ``timeline-rank<N>.json`` (``SMP_TIMELINE``), or a folder of them. For each module and phase, the
                median over all microbatches counts. Segments of one microbatch count together. Each module runs on one of a
                replica's ranks; replicas beside it count as further microbatches.

        Raises:
            ConfigError: the file is missing or broken, or has no training step.
        """
        place = Path(file)
        paths = sorted(place.glob(f"{FILE_PREFIX}*{FILE_SUFFIX}")) if place.is_dir() else [place]
        try:
            ranks = [parse_timeline(path.read_bytes(), str(path)) for path in paths]
        except OSError as error:
            raise ConfigError(
                f"{place} cannot be read: {error.strerror or error}; measured durations come from the timeline of a rank: name a "
                f"{FILE_PREFIX}0{FILE_SUFFIX}, or the folder that holds it",
                code="SMP110",
            ) from None
        return self.with_timelines(ranks, str(place))

    def with_timelines(self, ranks: Sequence[RankTimeline], where: str) -> RateCard:
        """Return the same card with durations from timelines that have been read.

        Args:
            where: their name, for messages and ``sources``.

        Raises:
            ConfigError: they hold no training step.
        """
        found = measured_durations(ranks)
        if not found:
            raise ConfigError(
                f"{where} holds no training step that ended ({len(ranks)} files of ranks); measured durations are those of steps "
                f"with a backward pass: record some with {TIMELINE_VARIABLE}=10, and name the job's timelines",
                code="SMP110",
            )
        return self.model_copy(update={"measured": found, "sources": (*self.sources, f"durations: {Path(where).name}")})

    def _latency(self, kind: str, on_host: int, hosts: int) -> float:
        """Return the latency of a collective: the sum over the steps of a ring.

        An all-reduce or a barrier takes twice the latency of a ring or a tree, the lower one. All messages of a gather,
        scatter or all-to-all go at once, so only the slowest link counts.
        """
        near = self._link(inside=True).latency if on_host > 1 else 0.0
        far = self._link(inside=False).latency if hosts > 1 else 0.0
        ring = (on_host * hosts - hosts) * near + (hosts - 1) * far
        if kind in ("gather", "scatter", "all_to_all"):
            return max(near, far)  # all at once
        tree = (on_host - 1) * near + math.ceil(math.log2(hosts)) * far
        if kind in ("all_reduce", "barrier"):
            return 2 * min(ring, tree)
        # NCCL sends broadcasts and single sums in rings, and pipelines the pieces.
        return ring

    def _inside(self, sent: float) -> float:
        return sent / self._link(inside=True).bytes_per_second

    def _between(self, sent: float) -> float:
        return sent / self._link(inside=False).bytes_per_second

    def _link(self, *, inside: bool) -> Link:
        link = self.inside if inside else self.between
        if link is None:
            where = "inside a host" if inside else "between hosts"
            raise ConfigError(
                f"the rate card of {self.name} has no link {where}, and ranks there exchange bytes; none is published for the "
                f"instance, or the card is of one GPU: give {'inside' if inside else 'between'} with bytes_per_second and latency",
                code="SMP110",
            )
        return link


def measured_durations(ranks: Iterable[RankTimeline]) -> tuple[Measured, ...]:
    """Return, by module and phase, the median seconds of a microbatch.

    Training steps of these ranks that did not fail count.
    """
    seconds: dict[tuple[str, Phase], list[float]] = {}
    for rank in ranks:
        for step in rank.steps:
            if step.failed or not any(kind == "B" for _, kind, *_ in step.actions):
                continue
            of_step: dict[tuple[str, Phase, int], float] = {}
            for _, kind, microbatch, path, start, stop in step.actions:
                key = rank.paths[path], _PHASES[kind], microbatch
                of_step[key] = of_step.get(key, 0.0) + stop - start
            for (path_name, phase, _), each in of_step.items():
                seconds.setdefault((path_name, phase), []).append(each)
    return tuple(
        Measured(path=path_name, phase=phase, seconds=statistics.median(of), count=len(of))
        for (path_name, phase), of in sorted(seconds.items())
    )


def sent_bytes(kind: str, ranks: int, size: float) -> float:
    """Return the bytes that a rank of a ring sends in one collective of ``size`` bytes in all. Fewer are not possible.

    With n ranks, an all-gather or reduce-scatter sends (n − 1)/n · size, and an all-reduce 2(n − 1)/n · size (Patarasuk
    and Yuan 2009). An all-to-all, gather or scatter also moves (n − 1)/n · size. A broadcast or reduce passes the whole on.
    """
    if kind == "barrier" or ranks < 2:
        return 0.0
    if kind in ("broadcast", "reduce"):
        return size
    once = (ranks - 1) / ranks * size
    # An all-reduce is a reduce-scatter and an all-gather.
    if kind == "all_reduce":
        return 2 * once
    return once


__all__ = [
    "COLLECTIVE_KINDS",
    "CollectiveKind",
    "Link",
    "Measured",
    "Phase",
    "RateCard",
    "measured_durations",
    "sent_bytes",
]
