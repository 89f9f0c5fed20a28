"""Batch arithmetic: replicas, global batch, tokens, microbatches."""

from __future__ import annotations

from dataclasses import dataclass

from smp_config import ConfigError, Group, ModelParallelParameters, Topology


@dataclass(frozen=True)
class Batches:
    """How many samples go where in one optimizer step.

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
        """Tokens per optimizer step."""
        return self.global_batch * self.sequence


def batches(
    topology: Topology,
    batch: int,
    *,
    sequence: int = 1,
    prescaled: bool = False,
    microbatches: int = 1,
    accumulation: int = 1,
) -> Batches:
    """The batch arithmetic of a job.

    Without ``prescaled`` each of the ``dp_size`` ranks reads its own batch; with it a tensor parallel group reads one
    together, so ``rdp_size`` batches are read (public page on sharded data parallelism with tensor parallelism,
    example 1: 1536 GPUs, batch 1 → 1536 samples; tensor degree 8, batch 4 → 192 groups × 4 = 768 samples).

    Raises:
        ConfigError: a count below 1, or a batch that the microbatches do not divide.
    """
    for name, value in (
        ("batch", batch),
        ("sequence", sequence),
        ("microbatches", microbatches),
        ("accumulation", accumulation),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is {value!r} ({type(value).__name__}); it is a count: set {name} to 1 or more")
    if batch % microbatches:
        up = -(-batch // microbatches) * microbatches
        down = batch // microbatches * microbatches
        raise ConfigError(
            f"a batch of {batch} samples cannot be divided into {microbatches} microbatches ({batch} = {microbatches} × "
            f"{batch // microbatches} + {batch % microbatches}); use a batch of "
            + (f"{down} or {up}" if down else f"{up}, or at most {batch} microbatches")
        )
    replicas = topology.size(Group.RDP)
    readers = replicas if prescaled else topology.size(Group.DP)
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
    """:func:`batches` for the settings of a job with ``world`` processes."""
    return batches(
        parameters.topology(world),
        batch,
        sequence=sequence,
        prescaled=parameters.prescaled_batch,
        microbatches=parameters.microbatches,
        accumulation=accumulation,
    )


def batch_for(topology: Topology, global_batch: int, *, prescaled: bool = False, accumulation: int = 1) -> int:
    """The script's batch size that makes ``global_batch`` samples per optimizer step.

    Raises:
        ConfigError: the readers do not divide it.
    """
    each = (topology.size(Group.RDP) if prescaled else topology.size(Group.DP)) * accumulation
    if global_batch < 1 or global_batch % each:
        near = max(1, round(global_batch / each)) * each
        raise ConfigError(
            f"a global batch of {global_batch} samples cannot be read by {each // accumulation} readers in {accumulation} "
            f"accumulation steps ({each} batches per optimizer step); use a global batch of {near}"
        )
    return global_batch // each
