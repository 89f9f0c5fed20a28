"""Batch arithmetic: replicas, global batch, tokens, and the microbatches and layers of the stages of a pipeline."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from smp_config import ConfigError, Group, ModelParallelParameters, Topology
from smp_config.schedules import DEFAULT_SCHEDULE, DOCUMENTED, SCHEDULES, TRAITS, default_active, in_flight_counts


@dataclass(frozen=True)
class Batches:
    """The numbers of samples in one optimizer step.

    Attributes:
        replicas: model replicas; each is ``pipeline × tensor`` processes.
        readers: groups of processes that read different data; each reads ``batch`` samples at a time.
        batch: samples that one reader reads, the batch size of the training script.
        group_batch: samples that pass through one model replica, which is ``batch`` times the readers inside it.
        microbatch: samples of a reader's microbatch.
        microbatches: slices of ``batch``.
        accumulation: batches per optimizer step.
        sequence: tokens per sample.
        global_batch: samples per optimizer step.
    """

    world: int
    replicas: int
    readers: int
    batch: int
    group_batch: int
    microbatch: int
    microbatches: int
    accumulation: int
    sequence: int
    global_batch: int

    @property
    def tokens(self) -> int:
        """Return the tokens per optimizer step."""
        return self.global_batch * self.sequence


@dataclass(frozen=True)
class Epochs:
    """The optimizer steps of a data set.

    Counted as readers count that drop what is left over (``DistributedSampler(drop_last=True)`` and
    ``DataLoader(drop_last=True)``): microbatches need whole batches.

    Attributes:
        samples: of the data set.
        global_batch: samples per step.
        epochs: passes through the data set.
        steps: per epoch.
        dropped: samples that an epoch leaves out.
        tokens: of the data set, when they were given.
        sequence: tokens per sample as they are computed with.
    """

    samples: int
    global_batch: int
    epochs: int
    steps: int
    dropped: int
    tokens: int | None
    sequence: int

    @classmethod
    def of(cls, batch: Batches, samples: int | None, tokens: int | None, epochs: int = 1) -> Epochs:
        """Return the epochs of a data set of ``samples``, or of ``tokens`` cut into samples of a whole sequence.

        Raises:
            ConfigError: fewer tokens than one sample.
        """
        if samples is None:
            tokens = tokens or 0
            require_one_sample(tokens, batch.sequence)
            samples = tokens // batch.sequence
        steps, dropped = divmod(samples, batch.global_batch)
        return cls(samples, batch.global_batch, epochs, steps, dropped, tokens, batch.sequence)

    @property
    def total_steps(self) -> int:
        """Return the steps of all epochs."""
        return self.epochs * self.steps

    def to_dict(self) -> dict[str, int | None]:
        """Return the numbers by name."""
        return {**asdict(self), "total_steps": self.total_steps}

    def lines(self) -> list[str]:
        """Return lines of text: steps of an epoch and of all epochs, dropped samples, and the global batch's effect."""
        samples = f"{self.samples:,} sample{'s' if self.samples != 1 else ''}"
        if self.tokens is not None:
            per_sample = self.tokens / self.samples
            samples += f" of {self.tokens:,} tokens"
            if per_sample < 0.99 * self.sequence:
                samples += (
                    f" ({per_sample:,.0f} each, so {1 - per_sample / self.sequence:.0%} of what is computed is padding)"
                )
        if not self.steps:
            return [
                f"{samples} are fewer than the global batch of {self.global_batch:,}, so an epoch has no whole step; lower the "
                "batch, the accumulation or the number of replicas"
            ]
        left = "none left over"
        if self.dropped:
            left = f"{self.dropped:,} left over and dropped ({100 * self.dropped / self.samples:.2g}% of an epoch)"
        said = [f"{samples} ÷ {self.global_batch:,} per step = {_steps(self.steps)} per epoch, {left}"]
        if self.epochs > 1:
            said.append(f"{self.epochs} epochs: {_steps(self.total_steps)}")
        half = self.samples // max(1, self.global_batch // 2)
        said.append(
            f"a step averages the gradients of {self.global_batch:,} samples and updates the weights once"
            + (f": half the global batch would update them {half:,} times per epoch" if self.global_batch > 1 else "")
        )
        return said


def require_one_sample(tokens: int, sequence: int) -> None:
    """Raise ConfigError if a data set has fewer tokens than one sample."""
    if tokens < sequence:
        raise ConfigError(
            f"tokens is {tokens}, less than one sample of {sequence} tokens; give the tokens of the whole data set, or a shorter "
            "sequence",
            code="SMP110",
        )


def _steps(count: int) -> str:
    return f"{count:,} step{'s' if count != 1 else ''}"


def batches(
    topology: Topology,
    batch: int,
    *,
    sequence: int = 1,
    prescaled: bool = False,
    microbatches: int = 1,
    accumulation: int = 1,
) -> Batches:
    """Return the batch arithmetic of a job.

    Without ``prescaled`` each of the ``dp_size`` ranks reads its own batch. With it a tensor parallel group reads
    one together, so ``rdp_size`` batches are read (public page on sharded data parallelism with tensor
    parallelism, example 1: 1536 GPUs, batch 1 → 1536 samples; tensor degree 8, batch 4 → 192 groups × 4 = 768
    samples).

    Raises:
        ConfigError: a count below 1, or a batch that the microbatches do not divide.
    """
    for name, value in (
        ("batch", batch),
        ("sequence", sequence),
        ("microbatches", microbatches),
        ("accumulation", accumulation),
    ):
        # A flag is an ``int`` in Python, and no count.
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{name} is {value!r} ({type(value).__name__}); it is a count: set {name} to 1 or more", code="SMP110"
            )
    if batch % microbatches:
        up = -(-batch // microbatches) * microbatches
        down = batch // microbatches * microbatches
        raise ConfigError(
            f"a batch of {batch} samples cannot be divided into {microbatches} microbatches ({batch} = {microbatches} × "
            f"{batch // microbatches} + {batch % microbatches}); use a batch of "
            + (f"{down} or {up}" if down else f"{up}, or at most {batch} microbatches"),
            code="SMP110",
        )
    # Ranks that share sequences out read one batch.
    replicas = topology.size(Group.BATCH_RDP)
    readers = replicas if prescaled else topology.size(Group.BATCH_DP)
    return Batches(
        world=topology.world_size,
        replicas=replicas,
        readers=readers,
        batch=batch,
        group_batch=batch * readers // replicas,
        microbatch=batch // microbatches,
        microbatches=microbatches,
        accumulation=accumulation,
        sequence=sequence,
        global_batch=readers * batch * accumulation,
    )


def batches_of(
    parameters: ModelParallelParameters, world: int, batch: int, *, sequence: int = 1, accumulation: int = 1
) -> Batches:
    """Return :func:`batches` for the settings of a job with ``world`` processes."""
    return batches(
        parameters.topology(world),
        batch,
        sequence=sequence,
        prescaled=parameters.prescaled_batch,
        microbatches=parameters.microbatches,
        accumulation=accumulation,
    )


def batch_for(topology: Topology, global_batch: int, *, prescaled: bool = False, accumulation: int = 1) -> int:
    """Return the script's batch size for ``global_batch`` samples per optimizer step.

    Raises:
        ConfigError: no whole batch size leads to this global batch.
    """
    each = topology.size(Group.BATCH_RDP if prescaled else Group.BATCH_DP) * accumulation
    if global_batch < 1 or global_batch % each:
        near = max(1, round(global_batch / each)) * each
        raise ConfigError(
            f"a global batch of {global_batch} samples cannot be divided over {each // accumulation} ranks in {accumulation} "
            f"accumulation steps ({each} batches per optimizer step); use a global batch of {near}",
            code="SMP110",
        )
    return global_batch // each


def idle_fraction(
    stages: int,
    microbatches: int,
    schedule: str = DEFAULT_SCHEDULE,
    active: int | None = None,
    *,
    again: bool = False,
    pieces: int = 1,
) -> float:
    """Return the part of a step in which a stage waits.

    :class:`~smp_config.schedules.ScheduleTraits` has the formula of each schedule.

    Args:
        active: a, the most microbatches in flight; None: enough.
        again: activation checkpointing computes forward passes again.
        pieces: v, the pieces that each stage owns (``virtual_stages``). They fill the pipeline in 1/v of the time
            if at least twice as many microbatches as stages are in flight: (p − 1) / (v·m + p − 1) (Narayanan et
            al. 2021, section 2.2). The gain of zero_bubble does not come on top.
    """
    _at_least_one(stages=stages, microbatches=microbatches)
    traits = TRAITS[schedule]
    most = microbatches if active is None else max(1, min(active, microbatches))
    if pieces > 1 and most >= min(microbatches, 2 * stages):
        waves = -(-microbatches // most) if traits.has_waves else 1
        return waves * (stages - 1) / (pieces * microbatches + waves * (stages - 1))
    if active is None and not traits.splits_backward:
        return (stages - 1) / (microbatches + stages - 1)
    return traits.idle(stages, microbatches, most, 2 if again else 1)


def in_flight(schedule: str, stage: int, stages: int, microbatches: int, active: int | None = None) -> int:
    """Return how many microbatches have their activations on a stage at once, by the schedule's traits.

    The result is never more than ``active`` (``active_microbatches``; None: its default).

    Raises:
        ConfigError: a stage that does not exist, or an unknown schedule.
    """
    _at_least_one(stages=stages, microbatches=microbatches)
    if not 0 <= stage < stages:
        raise ConfigError(
            f"stage {stage} does not exist; pipeline_parallel_degree {stages} makes stages 0 to {stages - 1}: use one of these",
            code="SMP110",
        )
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"pipeline is {schedule!r}; schedules are {', '.join(map(repr, DOCUMENTED))}: use one of them",
            code="SMP110",
        )
    most = default_active(stages) if active is None else active
    return in_flight_counts(schedule, stages, microbatches, most)[stage]


def layers_of_stages(layers: int, stages: int, pieces: int = 1, *, first_has_more: bool = True) -> list[list[int]]:
    """Return the layers of each stage.

    With several pieces (``virtual_stages``) piece k is on stage k modulo ``stages``.

    Args:
        first_has_more: the first piece has one of the layers that are left over, if any are; else they begin with the second.

    Raises:
        ConfigError: fewer layers than pieces.
    """
    if pieces > 1 and stages * pieces > layers:
        raise ConfigError(
            f"virtual_stages is {pieces}, so {stages} stages own {stages * pieces} pieces, but the model has {layers} layers; use "
            f"virtual_stages of at most {max(1, layers // stages)}",
            code="SMP110",
        )
    found: list[list[int]] = [[] for _ in range(stages)]
    for piece in range(stages * pieces):
        found[piece % stages] += layers_of_stage(layers, stages * pieces, piece, first_has_more=first_has_more)
    return found


def layers_of_stage(layers: int, stages: int, stage: int, *, first_has_more: bool = True) -> range:
    """Return the layers of a stage in an even division; the first stages get one more if there is a remainder.

    The automatic partition balances by cost and may put fewer layers beside the embedding; this is its simple
    bound.
    """
    if stages > layers:
        raise ConfigError(
            f"pipeline_parallel_degree is {stages}, but the model has {layers} layers, so {stages - layers} stages would "
            f"hold none; use a degree of at most {layers}",
            code="SMP110",
        )
    each, more = divmod(layers, stages)
    place = stage if first_has_more else stage - 1
    first = stage * each + min(max(0, place), more)
    return range(first, first + each + (1 if 0 <= place < more else 0))


def _at_least_one(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it is a count: set it to 1 or more", code="SMP110")
