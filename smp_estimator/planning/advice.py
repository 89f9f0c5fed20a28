"""Changes for a plan that does not fit, the results of smaller clusters, and notes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from smp_config import ConfigError, Group
from smp_config.machine.collective_backends import needs_gpu
from smp_config.machine.instances import has_gpus, instances, require_usable
from smp_estimator.planning.forecast import Forecast, Verdict
from smp_estimator.planning.memory.device_memory import is_half, summed_bytes
from smp_estimator.planning.memory.kinds import Kind
from smp_estimator.planning.network import gathered_shards
from smp_estimator.planning.request import OPTIMIZER_BYTES
from smp_estimator.planning.smddp import SmddpUse

GB = 1e9


@dataclass(frozen=True)
class Change:
    """One thing to change, and the plan it leads to."""

    what: str
    plan: Forecast

    def __str__(self) -> str:
        return f"{self.what}: {format_memory(self.plan)}"


@dataclass(frozen=True)
class SmallerCluster:
    """The same job on fewer instances; ``plan`` is None if the degrees do not fit the number of processes."""

    instance_count: int
    processes: int
    plan: Forecast | None
    text: str

    def __str__(self) -> str:
        return self.text


def format_memory(forecast: Forecast) -> str:
    """Return a forecast's memory as text: ``"30.7 GB of 42.9 (71 %), fits"``."""
    size, fraction = forecast.request.gpu_memory_bytes, forecast.fraction
    if size is None or fraction is None:
        return f"{forecast.total_bytes / GB:.3g} GB per GPU"
    return f"{forecast.total_bytes / GB:,.1f} GB of {size / GB:.1f} ({fraction:.0%}), {forecast.verdict.value}"


def suggest_changes(forecast: Forecast) -> tuple[Change, ...]:
    """Return single changes that improve a plan that does not fit or is tight, in the order in which to try them.

    The batch comes first (the reference page: "you might want to lower batch size first"), then the changes that
    cost least: sharded optimizer state, checkpointing, tensor parallelism inside a node, sharded data
    parallelism, pipeline, offloading, shorter samples, larger instances, more instances. The global batch stays
    as it is except for the first.
    """
    if forecast.verdict in (Verdict.FITS, Verdict.UNKNOWN):
        return ()
    better = []
    for attempt in (
        _batch,
        _optimizer_state,
        _checkpointing,
        _tensor,
        _sharding,
        _pipeline,
        _context,
        _offload,
        _sequence,
        _larger,
        _more,
    ):
        best: Change | None = None
        for change in _valid(forecast, attempt):
            if (change.plan.fraction or 0.0) < (forecast.fraction or 0.0):  # a verdict knows the memory of both
                best = change
                if change.plan.verdict is Verdict.FITS:
                    break
        if best is not None and best.plan.verdict.feasible:
            better.append(best)
    return tuple(better)


#: Below this a shorter sequence is no advice any more.
_SHORTEST_SEQUENCE = 128

#: What to change in words, the settings of mp_parameters, and the fields of the request or the workload.
_Candidate = tuple[str, dict[str, Any], dict[str, Any]]


def _valid(forecast: Forecast, attempt: Callable[[Forecast], Iterator[_Candidate]]) -> Iterator[Change]:
    for what, settings, fields in attempt(forecast):
        try:
            yield Change(what, forecast.changed(settings, **fields))
        except ConfigError:
            continue  # this value cannot be laid over the processes; the next may


def _batch(forecast: Forecast) -> Iterator[_Candidate]:
    batch, microbatches = forecast.batches.batch, forecast.batches.microbatches
    # A larger batch never needs less, so the largest one that fits is between one that does and one that does not.
    fitting, too_many = 0, batch // microbatches
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if forecast.changed(batch=middle * microbatches).verdict is Verdict.FITS:
            fitting = middle
        else:
            too_many = middle
    smaller = max(1, fitting) * microbatches
    if smaller < batch:
        yield f"batch {smaller} instead of {batch}", {}, {"batch": smaller}


def _optimizer_state(forecast: Forecast) -> Iterator[_Candidate]:
    parameters = forecast.request.parameters
    if parameters.sharded_data_parallel_degree == 1 and not parameters.shard_optimizer_state:
        yield '"shard_optimizer_state": True', {"ddp": True, "shard_optimizer_state": True}, {}


def _checkpointing(forecast: Forecast) -> Iterator[_Candidate]:
    now = forecast.request.workload.activation_checkpointing
    for strategy in ("each", "group_2", "group_4"):
        if strategy != now:
            what = f'activation checkpointing with strategy="{strategy}"'
            yield what, {}, {"activation_checkpointing": strategy}


def _tensor(forecast: Forecast) -> Iterator[_Candidate]:
    now, gpus = forecast.request.parameters.tensor_parallel_degree, forecast.request.processes_per_host
    degree = now * 2
    while degree <= gpus and gpus % degree == 0:
        readers = degree if not forecast.request.parameters.prescaled_batch else degree // now
        batch = forecast.batches.batch * readers
        settings = {"ddp": True, "tensor_parallel_degree": degree, "prescaled_batch": True}
        what = f'"tensor_parallel_degree": {degree} with "prescaled_batch": True and batch {batch}'
        yield what, settings, {"batch": batch}
        degree *= 2


def _sharding(forecast: Forecast) -> Iterator[_Candidate]:
    parameters = forecast.request.parameters
    ranks = forecast.topology.size(Group.RDP)
    if parameters.tensor_parallel_degree > 1 and not parameters.prescaled_batch:
        return
    for degree in range(parameters.sharded_data_parallel_degree + 1, ranks + 1):
        if ranks % degree == 0:
            settings = {"ddp": True, "sharded_data_parallel_degree": degree, "shard_optimizer_state": False}
            what = f'"sharded_data_parallel_degree": {degree}' + (
                ' without "shard_optimizer_state"' if parameters.shard_optimizer_state else ""
            )
            yield what, settings, {}


def _pipeline(forecast: Forecast) -> Iterator[_Candidate]:
    degree = forecast.request.parameters.pipeline_parallel_degree * 2
    factor = 2
    while degree <= min(forecast.request.shape.layers, forecast.request.world):
        batch = forecast.batches.batch * factor
        microbatches = microbatches_for(degree, batch)
        settings = {"pipeline_parallel_degree": degree, "partitions": degree, "microbatches": microbatches}
        what = f'"pipeline_parallel_degree": {degree}, "microbatches": {microbatches} and batch {batch}'
        yield what, settings, {"batch": batch}
        degree, factor = degree * 2, factor * 2


def _context(forecast: Forecast) -> Iterator[_Candidate]:
    """Yield more ranks for each sequence; their replica reads as many samples as all of them did, one after the other."""
    parameters, batch = forecast.request.parameters, forecast.batches.batch
    now, factor = parameters.context_parallel_degree, 2
    ranks = forecast.topology.size(Group.BATCH_RDP)
    if parameters.compile or (parameters.tensor_parallel_degree > 1 and not parameters.prescaled_batch):
        return
    while factor <= ranks:
        more = batch * factor
        count = more if parameters.pipeline_parallel_degree == 1 else parameters.microbatches * factor
        settings = {"ddp": True, "context_parallel_degree": now * factor, "microbatches": count}
        what = f'"context_parallel_degree": {now * factor}, "microbatches": {count} and batch {more}'
        yield what, settings, {"batch": more}
        factor *= 2


def _offload(forecast: Forecast) -> Iterator[_Candidate]:
    if not forecast.request.parameters.offload_activations and forecast.request.workload.activation_checkpointing:
        yield '"offload_activations": True', {"offload_activations": True}, {}


def _sequence(forecast: Forecast) -> Iterator[_Candidate]:
    shape = forecast.request.shape
    shorter = shape.sequence // 2
    while shorter >= _SHORTEST_SEQUENCE and shape.has_layers:
        yield f"sequence {shorter} instead of {shape.sequence}", {}, {"shape": shape.with_sequence(shorter)}
        shorter //= 2


def _larger(forecast: Forecast) -> Iterator[_Candidate]:
    now = forecast.instance
    if now is None:
        return
    family = now.name.split(".")[1][0]  # p or g
    larger = [
        other
        for other in instances()
        if other.gpus == now.gpus
        and other.gpu_facts.dropped_by_cuda is None
        and other.gpu_memory_bytes > now.gpu_memory_bytes
        and other.name.split(".")[1][0] == family
        and other.efa >= now.efa
    ]
    for other in sorted(larger, key=lambda known: (known.gpu_memory_bytes, known.name)):
        fields = {"instance_type": other.name, "gpu_memory_bytes": other.gpu_memory_bytes}
        yield f"{other.name} ({other.gpu}) instead of {now.name}", {}, fields


def _more(forecast: Forecast) -> Iterator[_Candidate]:
    """Yield larger clusters; only sharded state shrinks, so the sharding degree grows with the cluster."""
    degree, count = forecast.request.parameters.sharded_data_parallel_degree, forecast.request.instance_count
    for factor in (2, 4, 8, 16, 32, 64):
        settings = {"sharded_data_parallel_degree": degree * factor} if degree > 1 else {}
        what = f"{count * factor} instances" + (
            f' with "sharded_data_parallel_degree": {degree * factor}' if settings else ""
        )
        yield what, settings, {"instance_count": count * factor}


def microbatches_for(stages: int, batch: int) -> int:
    """Return the fewest microbatches, at least 4 per stage, that divide ``batch``; ``batch`` itself if it is smaller."""
    if stages == 1:
        return 1
    return next((m for m in range(4 * stages, batch + 1) if batch % m == 0), batch)


def smaller_clusters(forecast: Forecast) -> tuple[SmallerCluster, ...]:
    """Return the results of the same settings on 1/2, 1/4, … of the instances, down to one.

    Sharded state per rank grows as the number of ranks shrinks. So a model that fits on many GPUs may not fit on
    half of them (the best practices warn of this when downsizing a cluster).
    """
    found = []
    count = forecast.request.instance_count // 2
    while count >= 1:
        found.append(_on(forecast, count))
        count //= 2
    return tuple(found)


def _on(forecast: Forecast, count: int) -> SmallerCluster:
    request = forecast.request
    processes = count * request.processes_per_host
    where = f"{count} × {request.instance_type} ({processes} GPUs)"
    parameters = request.parameters
    degree = parameters.sharded_data_parallel_degree
    model_parallel = parameters.pipeline_parallel_degree * parameters.tensor_parallel_degree
    lowered = math.gcd(degree, processes // model_parallel) if processes % model_parallel == 0 else degree
    try:
        smaller = forecast.changed(
            {"sharded_data_parallel_degree": lowered} if lowered != degree else None, instance_count=count
        )
    except ConfigError as error:
        return SmallerCluster(count, processes, None, f"{where}: not possible, {error}")
    note = f", sharded_data_parallel_degree lowered from {degree} to {lowered}" if lowered != degree else ""
    text = f"{where}{note}: {format_memory(smaller)}"
    size = request.gpu_memory_bytes
    grown = smaller.worst.state - forecast.worst.state
    if size and smaller.worst.state > size:
        text += (
            f"; the state no longer fits: {smaller.worst.state / GB:.1f} GB per GPU, because its shards are spread over "
            "fewer GPUs"
        )
    elif smaller.verdict is Verdict.DOES_NOT_FIT and grown > 0:
        text += f"; the state per GPU grows by {grown / GB:.1f} GB, because its shards are spread over fewer GPUs"
    return SmallerCluster(count, processes, smaller, text)


def list_notes(forecast: Forecast) -> tuple[str, ...]:
    """Return sentences about the plan that are neither errors nor about the GPU's memory."""
    request, parameters = forecast.request, forecast.request.parameters
    said = list(parameters.warnings())
    known = forecast.instance
    if known is None:
        said.append(
            f"instance type {request.instance_type} is not in the catalogue; "
            + (
                "the memory of its GPUs is as given"
                if request.gpu_memory_bytes
                else "without their memory there is no verdict"
            )
        )
    said += _gpu(forecast)
    backend = parameters.ddp_dist_backend
    if needs_gpu(backend) and has_gpus(request.instance_type) is False:
        said.append(
            f'such a job is refused before it starts: ddp_dist_backend is "{backend}", which moves tensors between GPUs, and '
            f'{request.instance_type} has none; use "auto" or "gloo"'
        )
    if parameters.host_collectives and has_gpus(request.instance_type):
        said.append(
            "such a job is refused before it starts: host_collectives is true, which has ranks share host memory in jobs on CPUs, "
            f"and {request.instance_type} has GPUs; remove it"
        )
    per_node = request.processes_per_host
    tensor_nodes = forecast.nodes_of(Group.TP)
    if tensor_nodes > 1:
        said.append(
            f"a tensor parallel group of {parameters.tensor_parallel_degree} spreads over {tensor_nodes} nodes of {per_node} "
            f"processes (placement {parameters.placement}); its activations would cross the network in every layer: "
            f"use a degree of at most {per_node} and a placement that ends with T"
        )
    if request.instance_count > 1 and known is not None and not known.efa:
        said.append(f"{known.name} has no EFA; between {request.instance_count} instances it will be slow")
    if request.uses_smddp:
        said.append(str(SmddpUse.of(request, forecast.topology, gathered_shards(request))))
    said += _temporaries(forecast)
    said += _host_memory(forecast)
    if not request.shape.has_layers:
        said.append("the module shows no layers or width, so activations are not counted; give a ModelShape for them")
    elif request.shape.sequence == 1:
        said.append("a sample counts as one token, as the model shows no other length; give sequence=")
    if is_half(parameters) and request.workload.fp32_loss is False:
        said.append("the loss is counted on logits in half precision; a script that turns them into fp32 needs more")
    said += _plainer(forecast)
    return tuple(said)


def _gpu(forecast: Forecast) -> list[str]:
    """Return notes about features that the GPU itself lacks."""
    known = forecast.instance
    if known is None:
        return []
    said = []
    if forecast.request.parameters.bf16 and not known.gpu_facts.has_bf16:
        said.append(
            f'the {known.gpu} of {known.name} has no bfloat16 arithmetic: "bf16" is emulated there, slowly, where it works at '
            'all; use "fp16": True, or a type with newer GPUs'
        )
    dropped = known.gpu_facts.dropped_by_cuda
    try:
        require_usable(known.name)
    except ConfigError as error:
        said.append(f"such a job is refused before it starts: {error}")
        dropped = None
    if dropped is not None:
        said.append(
            f"builds of PyTorch for CUDA {dropped} and newer have no code for the {known.gpu} of {known.name}; such "
            "a job needs an image with an older build, or another type"
        )
    return said


def _temporaries(forecast: Forecast) -> list[str]:
    """Return a note if the temporary memory of PyTorch's Adam makes its step the moment with the highest usage."""
    optimizer, worst = forecast.request.workload.optimizer, forecast.worst
    if optimizer not in ("adam", "adamw"):
        return []
    more = 4 * worst.kinds[Kind.OPTIMIZER] // OPTIMIZER_BYTES[optimizer]
    if worst.in_update + more <= worst.total:
        return []
    return [
        f"not counted: PyTorch's Adam as it is by default on a GPU (foreach) needs {more / GB:,.1f} GB more in its step, "
        f"{(worst.in_update + more) / GB:,.1f} GB in all; made with fused=True it needs none"
    ]


def _host_memory(forecast: Forecast) -> list[str]:
    """Return notes about the needs on the instance's host memory."""
    known, request = forecast.instance, forecast.request
    if known is None:
        return []
    said = []
    # A script builds the model in fp32 on each rank unless initialisation is delayed.
    built = 4 * request.shape.parameters * request.processes_per_host
    if built > known.host_memory_bytes and not request.parameters.delayed_parameter_initialization:
        said.append(
            f"building the model in fp32 in every process takes {built / GB:.0f} GB of the host's "
            f'{known.host_memory_bytes / GB:.0f} GB; set "delayed_parameter_initialization": True'
        )
    if forecast.offloaded_host_bytes > known.host_memory_bytes:
        said.append(
            f"offloaded activations take {forecast.offloaded_host_bytes / GB:.0f} GB of the host's "
            f"{known.host_memory_bytes / GB:.0f} GB; lower the batch or checkpoint with group_2"
        )
    taken = forecast.memory_checkpoint_bytes
    if taken > known.host_memory_bytes:
        said.append(
            f"memory checkpoints take {taken / GB:,.0f} GB of the host's {known.host_memory_bytes / GB:,.0f} GB, so that the ranks "
            "would train without; use more instances, or save checkpoints to files"
        )
    elif 2 * taken > known.host_memory_bytes:
        said.append(
            f"memory checkpoints take {taken / GB:,.0f} GB of /dev/shm, more than half of the host's "
            f"{known.host_memory_bytes / GB:,.0f} GB, which is what a system gives it; enlarge it, in containers with --shm-size"
        )
    return said


def _plainer(forecast: Forecast) -> list[str]:
    """Return a note if data parallelism with sharded optimizer state alone fits too.

    The best practices advise this: more features than needed do not improve performance.
    """
    parameters = forecast.request.parameters
    degrees = {
        "pipeline_parallel_degree": parameters.pipeline_parallel_degree,
        "tensor_parallel_degree": parameters.tensor_parallel_degree,
        "sharded_data_parallel_degree": parameters.sharded_data_parallel_degree,
    }
    used = {name: degree for name, degree in degrees.items() if degree > 1}
    if not used or forecast.verdict is not Verdict.FITS:
        return []
    settings = {
        "ddp": True,
        "shard_optimizer_state": True,
        "prescaled_batch": False,
        "microbatches": 1,
        "partitions": 1,
    }
    try:
        each = max(
            1, forecast.batches.global_batch // (forecast.request.world * forecast.request.workload.accumulation)
        )
        plain = forecast.changed({**dict.fromkeys(degrees, 1), **settings}, batch=each)
    except ConfigError:
        return []
    if plain.verdict is not Verdict.FITS:
        return []
    return [
        f'data parallelism with "shard_optimizer_state" alone fits too ({format_memory(plain)}); '
        f"{', '.join(f'{name} {degree}' for name, degree in used.items())} would not make it faster"
    ]


def rule_line(forecast: Forecast) -> str:
    """Return the size of the whole model's state by rules of thumb, and the size on a GPU."""
    count, worst = forecast.request.shape.parameters, forecast.worst
    line = f"state of the whole model at 16 bytes per parameter: {16 * count / GB:,.1f} GB"
    if _keeps_float32_gradients(forecast):
        line += f", at 18, with gradients that stay in float32: {18 * count / GB:,.1f} GB"
    elif is_half(forecast.request.parameters):
        line += f", at 20, with float32 copies of the gradients: {20 * count / GB:,.1f} GB"
    return (
        line
        + f"; on this GPU {worst.state / GB:,.1f} GB of state, and {worst.in_update / GB:,.1f} GB in all in optimizer.step()"
    )


def _keeps_float32_gradients(forecast: Forecast) -> bool:
    """Return whether shards of half precision gradients stay in float32 after their reduction, and so need no copy."""
    parameters = forecast.request.parameters
    is_shared = parameters.shard_optimizer_state and forecast.topology.rdp_size > 1
    is_divided = parameters.sharded_data_parallel_degree > 1 or is_shared
    return is_half(parameters) and is_divided and summed_bytes(parameters) > 2
