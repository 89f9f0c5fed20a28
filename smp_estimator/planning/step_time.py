"""The time and cost of an optimizer step and of a whole training, by a simple model with listed assumptions.

Arithmetic: a token takes 2 operations per parameter of a matrix in forward, and twice that in backward;
attention adds 4 · sequence · hidden per layer in forward (Narayanan et al. 2021, section 3.4, and Chowdhery
et al. 2022, appendix B). A layer that is checkpointed is computed forward once more. GPUs reach one part of
their published peak, the same for all: Narayanan et al. 2021 measured 44–52 % on A100 with everything else
included.

Bytes are the lower bounds of :mod:`smp_estimator.planning.network`, sent at the published bandwidth of the
link, without latency. Traffic that the runtime sends in parallel with the arithmetic is hidden behind it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_config import Group, Topology
from smp_config.machine.instances import Instance, instance
from smp_config.topology import Coordinates
from smp_estimator.planning.batches import Batches, idle_fraction
from smp_estimator.planning.memory.device_memory import embedding_is_distributed
from smp_estimator.planning.memory.fsdp2 import share_of_context
from smp_estimator.planning.rates.fitted import FITTED
from smp_estimator.planning.request import UTILISATION
from smp_estimator.planning.timing.kernels import KernelSeconds, kernel_seconds, recomputed_part
from smp_records.rate_card import RateCard

if TYPE_CHECKING:
    from smp_estimator.planning.network import Traffic
    from smp_estimator.planning.rates.kernel_rates import KernelRates
    from smp_estimator.planning.request import Request

_HOUR = 3600.0

#: Part of the messages of tensor parallelism that asynchronous products leave in the open. An assumption: for a Llama 3 70B on 256
#: H100 they make bf16 9 % faster (torchtitan's asyncTP table of 2025-06), and messages are a fifth of the step.
ASYNC_PART = 0.5


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step of a rank.

    Attributes:
        operations: floating point operations of the rank, with what is computed again.
        peak: operations per second of its GPU at most, in the precision of the job.
        utilisation: part of the peak that is assumed.
        arithmetic: the operations at this part of the peak.
        tensor: messages of tensor parallelism; nothing hides them.
        idle: a stage waits while the pipeline fills and empties.
        pipeline: messages between stages.
        data: gradients, and parameters that are gathered.
        hidden: of ``data``, what is sent beside the arithmetic.
        tokens: that all ranks read in the step.
        context: keys and values of attention, without what travels beside its arithmetic.
        update: the optimizer's step, if rates of kernels are known.
        uncertainty: the relative error that is to be expected; None if none is known.
    """

    operations: float
    peak: float
    utilisation: float
    arithmetic: float
    tensor: float
    idle: float
    pipeline: float
    data: float
    hidden: float
    tokens: int
    context: float = 0.0
    update: float = 0.0
    uncertainty: float | None = None

    @property
    def total(self) -> float:
        """Return the seconds from one update to the next."""
        stays = self.arithmetic + self.tensor + self.context + self.idle + self.pipeline + self.update
        return stays + self.data - self.hidden

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of the whole job."""
        return self.tokens / self.total

    def to_dict(self) -> dict[str, float | None]:
        """Return the seconds by kind, and the assumptions."""
        return {
            "seconds": self.total,
            "arithmetic": self.arithmetic,
            "tensor_parallel": self.tensor,
            "context_parallel": self.context,
            "pipeline_idle": self.idle,
            "pipeline": self.pipeline,
            "data_parallel": self.data,
            "data_parallel_hidden": self.hidden,
            "update": self.update,
            "uncertainty": self.uncertainty,
            "tokens_per_second": self.tokens_per_second,
            "operations_per_rank": self.operations,
            "peak_operations_per_second": self.peak,
            "utilisation": self.utilisation,
        }


@dataclass(frozen=True)
class StepCost:
    """The price of the job's instances for one optimizer step.

    Attributes:
        usd_per_hour: of one instance.
        instance_count: of the job.
        is_given: the price is the user's, not the catalogue's.
        seconds: that the step takes.
        tokens: that all ranks read in it.
    """

    usd_per_hour: float
    instance_count: int
    is_given: bool
    seconds: float
    tokens: int

    @property
    def usd_per_step(self) -> float:
        """Return the price of all instances for the time of a step."""
        return self.usd_per_hour * self.instance_count * self.seconds / _HOUR

    @property
    def usd_per_million_tokens(self) -> float:
        """Return the price of a million tokens, which is comparable between jobs with different global batches."""
        return 1e6 * self.usd_per_step / self.tokens

    def to_dict(self) -> dict[str, float | bool]:
        """Return the numbers by name."""
        return {
            "usd_per_hour_and_instance": self.usd_per_hour,
            "is_given": self.is_given,
            "usd_per_step": self.usd_per_step,
            "usd_per_million_tokens": self.usd_per_million_tokens,
        }


@dataclass(frozen=True)
class Training:
    """The duration and price of all steps of a training; starting, evaluation and saving come on top.

    Attributes:
        steps: optimizer steps.
        epochs: passes through the data set that these are; None when its size is not known.
        seconds_per_step: from one update to the next.
        is_given: this time is the user's, not the model's.
        usd_per_step: None where no price is known.
    """

    steps: int
    epochs: float | None
    seconds_per_step: float
    is_given: bool
    usd_per_step: float | None

    @property
    def seconds(self) -> float:
        """Return the seconds of all steps."""
        return self.steps * self.seconds_per_step

    @property
    def usd(self) -> float | None:
        """Return the price of all steps; None if no price is known."""
        return None if self.usd_per_step is None else self.steps * self.usd_per_step

    def to_dict(self) -> dict[str, float | bool | None]:
        """Return the numbers by name."""
        return {
            "steps": self.steps,
            "epochs": self.epochs,
            "seconds_per_step": self.seconds_per_step,
            "is_given": self.is_given,
            "hours": self.seconds / _HOUR,
            "usd": self.usd,
        }

    def __str__(self) -> str:
        steps = f"{self.steps:,} step{_plural(self.steps)}"
        if self.epochs is not None:
            steps += f" ({self.epochs:,.3g} epoch{_plural(self.epochs)})"
        each = f"{self.seconds_per_step:.3g} s, as given" if self.is_given else f"about {self.seconds_per_step:.3g} s"
        price = "" if self.usd is None else f" and {_dollars(self.usd)}"
        return f"{steps} of {each}: {_duration(self.seconds)}{price}; starting, evaluation and saving come on top"


def _plural(count: float) -> str:
    return "" if count == 1 else "s"


def _dollars(usd: float) -> str:
    amount = f"{usd:,.2f}" if usd >= 1 else f"{usd:.3g}"
    return f"{amount} USD"


def _duration(seconds: float) -> str:
    """Return a duration as text, in the unit in which it has two or three digits."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    hours = seconds / _HOUR
    if hours < 2:
        return f"{60 * hours:.0f} minutes"
    days = f" ({hours / 24:,.1f} days)" if hours > 48 else ""
    return f"{hours:,.1f} hours{days}"


def precision_of(request: Request) -> str:
    """Return the precision of the job's matrix multiplications: ``"bf16"``, ``"fp16"`` or ``"fp32"``."""
    parameters = request.parameters
    if request.workload.autocast:
        known = instance(request.instance_type)
        return "bf16" if known is None or known.gpu_facts.has_bf16 else "fp16"
    return "bf16" if parameters.bf16 else "fp16" if parameters.fp16 else "fp32"


def unknown_because(request: Request) -> str | None:
    """Return why no time can be estimated, in words; None if one can."""
    known = instance(request.instance_type)
    if known is None:
        return "the type is not in the catalogue"
    if not request.shape.has_layers:
        return "the model shows no layers or width"
    if known.gpu_facts.tflops(precision_of(request)) is None:
        return f"no peak of the {known.gpu} in {precision_of(request)} is published"
    if request.instance_count > 1 and known.network_baseline_gbps is None:
        return "no bandwidth of its network is published"
    return None


def step_time(request: Request, topology: Topology, batch: Batches, sent: Traffic) -> StepTime | None:
    """Return the time of a step; None if a fact is unknown (:func:`unknown_because`).

    Args:
        sent: the bytes that a rank sends in the step.
    """
    known = instance(request.instance_type)
    if known is None or unknown_because(request) is not None:
        return None
    parameters = request.parameters
    # Never NaN: unknown_because() has found a published peak.
    peak = 1e12 * (known.gpu_facts.tflops(precision_of(request)) or math.nan)
    forward, backward = operations_of_rank(request, batch)
    kernels, rates = kernels_of(request, batch, peak, known)
    utilisation = request.workload.utilisation
    arithmetic, of_backward, update = (forward + backward) / (peak * utilisation), backward / (peak * utilisation), 0.0
    if kernels is not None:
        arithmetic, of_backward, update = kernels.forward + kernels.backward, kernels.backward, kernels.update
        utilisation = (forward + backward) / (peak * arithmetic)
    speed = peak * utilisation
    links = _Links(known, topology, request.processes_per_host, 1.0 if rates is None else rates.links)
    tensor = links.seconds(sent.tensor, Group.TP) * (ASYNC_PART if request.workload.async_tensor else 1.0)
    context = _context_seconds(request, batch, sent, links, speed)
    waits = idle_of(request)
    early = sent.data - sent.data_late
    if parameters.sharded_data_parallel_degree > 1:
        # Layers are gathered ahead and reduced behind, in forward and in backward.
        early, late = links.seconds(early, Group.SHARD), links.seconds(sent.data_late, Group.REPLICA)
        hidden = min(early, arithmetic)
    else:
        early, late = links.seconds(early, Group.RDP), links.seconds(sent.data_late, Group.RDP)
        # Buckets leave in the backward pass that ends the accumulation.
        hidden = min(early, of_backward / request.workload.accumulation)
    # ``waits`` is a part of the whole step, waiting included; of the rest alone it is waits / (1 − waits).
    return StepTime(
        operations=forward + backward,
        peak=peak,
        utilisation=utilisation,
        arithmetic=arithmetic,
        tensor=tensor,
        idle=(arithmetic + tensor + context) * waits / (1 - waits),
        pipeline=links.seconds(sent.pipeline, Group.PP),
        data=early + late,
        hidden=hidden,
        tokens=batch.tokens,
        context=context,
        update=update,
        uncertainty=None if rates is None else _error(request, rates, known.gpu),
    )


def _error(request: Request, rates: KernelRates, gpu: str) -> float:
    """Return the relative error that is to be expected of a step's time."""
    return rates.error(gpu, request.parameters.context_parallel_degree, is_async=request.workload.async_tensor)


def kernels_of(
    request: Request, batch: Batches, peak: float, known: Instance
) -> tuple[KernelSeconds | None, KernelRates | None]:
    """Return the seconds of kernels and their rates; None if one part of the peak counts for everything."""
    workload = request.workload
    rates = workload.rates or (FITTED if workload.engine == "fsdp2" and workload.utilisation == UTILISATION else None)
    if rates is None or known.memory_gb_per_s is None:
        return None, None
    return kernel_seconds(request, batch, rates, peak, known.memory_gb_per_s * 1e9), rates


def _context_seconds(request: Request, batch: Batches, sent: Traffic, links: _Links, speed: float) -> float:
    """Return the time for which attention waits for keys and values of other ranks.

    In a ring they travel while those that came before are computed with. An all-gather has only a rank's own keys to compute
    with meanwhile, and an exchange of heads has none.
    """
    share = share_of_context(request)
    if share is None:
        return 0.0
    if share.is_pytorch:
        return _context_seconds_of_pytorch(request, batch, sent, links, speed)
    maps = 3 if request.workload.activation_checkpointing is None else 4  # forward, and backward as two of it
    attention = maps * _attention_operations(request, batch) / speed
    beside = {"ring": 1 - 1 / share.degree, "all_gather": 1 / share.degree, "all_to_all": 0.0}[share.method]
    return max(0.0, links.exchange_seconds(sent.context, share.degree) - beside * attention)


def _context_seconds_of_pytorch(request: Request, batch: Batches, sent: Traffic, links: _Links, speed: float) -> float:
    """Return the time for which PyTorch's ``context_parallel`` waits for messages.

    In a graph that is compiled, a collective is waited for where it is called, and Inductor moves it only if it is asked to
    (``reorder_for_compute_comm_overlap``). An operation at a time, messages travel beside the blocks of the layer, except the first
    one's arrival.
    """
    seconds = links.seconds(sent.context, Group.CONTEXT)
    if request.workload.compiled:
        return seconds
    degree = request.parameters.context_parallel_degree
    # Forward and backward of causal sequences, which need half of each map.
    beside = 2 * _attention_operations(request, batch) / speed * (1 - 1 / degree)
    return max(seconds / degree, seconds - beside)


def _attention_operations(request: Request, batch: Batches) -> float:
    """Return a rank's floating point operations for the maps of attention and their products with values, in forward."""
    shape, parameters = request.shape, request.parameters
    ranks = parameters.pipeline_parallel_degree * parameters.tensor_parallel_degree * parameters.context_parallel_degree
    tokens = batch.group_batch * batch.sequence * request.workload.accumulation
    return tokens * 4 * shape.layers * batch.sequence * shape.hidden / ranks


def idle_of(request: Request) -> float:
    """Return the part of a step that a pipeline stage waits, for the settings' schedule and microbatches in flight."""
    parameters = request.parameters
    again = request.workload.activation_checkpointing is not None
    stages, count = parameters.pipeline_parallel_degree, parameters.microbatches
    active, pieces = parameters.active_microbatches, parameters.virtual_stages
    return idle_fraction(stages, count, parameters.pipeline, active, again=again, pieces=pieces)


def operations_of_rank(request: Request, batch: Batches) -> tuple[float, float]:
    """Return a rank's floating point operations in an optimizer step: in forward, and in backward with recomputation.

    All stages count as equal. Tensor parallelism divides the output matrix if the embedding is distributed, or if
    each rank of the group computes the loss of its own samples.
    """
    shape, parameters, script = request.shape, request.parameters, request.workload
    tensor, stages = parameters.tensor_parallel_degree, parameters.pipeline_parallel_degree
    tokens = batch.group_batch * batch.sequence * script.accumulation / parameters.context_parallel_degree
    # An addition and a multiplication per parameter and token; then the attention's map, and its product with the values.
    layers = (
        tokens * (2 * shape.layer_parameters + 4 * shape.layers * batch.sequence * shape.hidden) / (stages * tensor)
    )
    head_ranks = tensor if embedding_is_distributed(parameters, script) or not parameters.prescaled_batch else 1
    head = tokens * 2 * shape.vocabulary * shape.hidden / (stages * head_ranks)
    again = layers * recomputed_part(request)
    # Backward has two products for each of forward: gradients of the inputs, and of the weights.
    return layers + head, 2 * (layers + head) + again


def step_cost(request: Request, seconds: float | None, tokens: int) -> StepCost | None:
    """Return the cost of a step of ``tokens``; None without a time, or without a price."""
    price = request.usd_per_hour
    if seconds is None or price is None:
        return None
    return StepCost(price, request.instance_count, request.instance_type in request.workload.prices, seconds, tokens)


class _Links:
    """The times that a topology's groups need for their bytes, by the rates of the instance."""

    def __init__(self, known: Instance, topology: Topology, per_host: int, part: float = 1.0) -> None:
        self._part = part
        self._topology, self._per_host = topology, per_host
        self._card = RateCard.of_instance(known.name, processes_per_host=per_host)

    def seconds(self, sent: float, group: Group) -> float:
        """Return the time in which each rank of groups of this kind sends ``sent`` bytes to others of its group."""
        on_host = Counter(rank // self._per_host for rank in self._members(group))
        return self._card.seconds_of_traffic(sent, max(on_host.values()), len(on_host)) / self._part

    def exchange_seconds(self, sent: float, ranks: int) -> float:
        """Return the time in which each rank of a context group receives ``sent`` bytes from the others, without latency."""
        hosts = len({rank // self._per_host for rank in self._members(Group.CONTEXT)})
        if not sent:
            return 0.0
        seconds = self._card.seconds_of_exchange(sent, ranks, hosts) - self._card.seconds_of_exchange(0, ranks, hosts)
        return seconds / self._part

    def _members(self, group: Group) -> list[int]:
        """Return the ranks of rank 0's group of this kind; the other groups are placed in the same way."""
        topology = self._topology
        degree = topology.sharded
        axis, positions = {
            Group.TP: ("tp", range(topology.tensor)),
            Group.PP: ("pp", range(topology.pipeline)),
            Group.RDP: ("rdp", range(topology.rdp_size)),
            Group.CONTEXT: ("rdp", range(topology.context)),
            Group.SHARD: ("rdp", range(degree)),
            Group.REPLICA: ("rdp", range(0, topology.rdp_size, degree)),
        }[group]
        ranks = []
        for position in positions:
            place = {"pp": 0, "tp": 0, "rdp": 0, axis: position}
            ranks.append(topology.rank_at(Coordinates(**place)))
        return ranks
