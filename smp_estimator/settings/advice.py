"""Advice from experience with distributed training, logged as warnings if it applies to a configuration.

Nothing here raises an error. Each sentence names the finding, the reason why it matters, and an alternative to consider.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from smp_config.machine.instances import GIB, Instance, instance, instances
from smp_estimator.settings.scripts import first_use

if TYPE_CHECKING:
    from smp_config import JobSettings

#: Hyperparameters that say how many samples a rank reads for one step.
BATCH_NAMES = tuple(
    """batch_size train_batch_size per_device_train_batch_size per_gpu_train_batch_size per_device_batch_size
    micro_batch_size""".split()
)

#: Hyperparameters that give the shape of a transformer.
_SHAPE_NAMES = {
    "layers": ("num_layers", "layers", "n_layer", "n_layers", "num_hidden_layers"),
    "hidden": ("hidden_width", "hidden_size", "hidden", "n_embd", "d_model"),
    "vocabulary": ("vocab_size", "vocabulary"),
}

#: Vocabulary when only layers and width are given; of GPT-2.
_USUAL_VOCABULARY = 50_257

#: Parameters, gradients, master copy and two moments of Adam, per parameter.
BYTES_PER_PARAMETER = 16

#: Activations need room too: a state above this share of the memory is not called fitting.
_STATE_SHARE = 0.5

#: Below this many samples the statistics of a batch normalisation become unreliable.
SMALL_BATCH = 16

_BATCH_NORM = re.compile(r"BatchNorm[123]d|resnet\d+|mobilenet_v\d|vgg\d+_bn")

#: Normalises over the samples of all replicas.
_OVER_RANKS = re.compile(r"SyncBatchNorm|convert_sync_batchnorm")


def advise(
    settings: JobSettings, *, hosts: int | None, hyperparameters: Mapping[str, Any], entry_point: Any, source_dir: Any
) -> Iterator[str]:
    """Yield sentences of advice on a model parallel job; most jobs get none.

    Args:
        hosts: None when only a pipeline knows.
        hyperparameters: the user's; there is no advice on facts that they do not contain.
        entry_point, source_dir: the script; it and its imports are searched for batch normalization.
    """
    known = instance(settings.instance_type) if settings.instance_type else None
    yield from _data_parallel_first(settings, known, hyperparameters)
    yield from _larger_instance_first(known, hosts)
    yield from _batch_normalisation(settings, hosts, hyperparameters, entry_point, source_dir)


def other_regions(places: Mapping[str, str], session: Any) -> Iterator[str]:
    """Yield sentences about buckets in another region than the job's.

    Args:
        places: name of the data → its ``s3://`` address.
        session: the SDK's session; a bucket that does not answer within seconds is skipped.
    """
    here = session.boto_region_name
    found: dict[str, str | None] = {}
    for what, address in places.items():
        bucket = address.removeprefix("s3://").split("/")[0]
        if bucket not in found:
            found[bucket] = _region_of(bucket, session)
        region = found[bucket]
        if region and region != here:
            yield (
                f"{what} ({address}) lies in {region}, and the job runs in {here}: reading across regions is slow and is "
                f"billed, and the service may refuse it; copy the data to a bucket in {here}, or run the job in {region}"
            )


def _data_parallel_first(
    settings: JobSettings, known: Instance | None, hyperparameters: Mapping[str, Any]
) -> Iterator[str]:
    parameters = settings.model_parallel
    if parameters is None or known is None:
        return
    degrees = {
        "pipeline_parallel_degree": parameters.pipeline_parallel_degree,
        "tensor_parallel_degree": parameters.tensor_parallel_degree,
        "sharded_data_parallel_degree": parameters.sharded_data_parallel_degree,
    }
    used = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    layers, hidden = (_first(hyperparameters, _SHAPE_NAMES[name]) for name in ("layers", "hidden"))
    if not used or layers is None or hidden is None:
        return
    vocabulary = _first(hyperparameters, _SHAPE_NAMES["vocabulary"]) or _USUAL_VOCABULARY
    count = 12 * layers * hidden**2 + vocabulary * hidden
    state = count * BYTES_PER_PARAMETER
    if state <= _STATE_SHARE * known.gpu_memory_bytes:
        yield (
            f"the model seems to fit one GPU: {layers} layers of width {hidden} are about {count / 1e9:.2g} billion parameters, "
            f"{state / GIB:.1f} GiB with gradients and Adam's state, and a GPU of {known.name} has "
            f"{known.gpu_memory_bytes / GIB:.0f} GiB; data parallelism alone ('ddp': True without {' and '.join(used)}) is then "
            "the faster start, model parallelism for when memory runs out"
        )


def _larger_instance_first(known: Instance | None, hosts: int | None) -> Iterator[str]:
    if known is None or not hosts or hosts < 2:
        return
    family = known.name.rpartition(".")[0] + "."
    larger = sorted(
        (row for row in instances() if row.name.startswith(family) and row.gpu == known.gpu and row.gpus > known.gpus),
        key=lambda row: (row.gpus, row.host_memory_bytes),
    )
    if not larger:
        return
    wanted = known.gpus * hosts
    best = next((row for row in larger if row.gpus >= wanted), larger[-1])
    count = -(-wanted // best.gpus)
    yield (
        f"the job uses {hosts} × {known.name} ({known.gpus} GPUs each, {wanted} in all): a larger instance before more "
        f"instances keeps the traffic inside one machine; {count} × {best.name} has {best.gpus * count} GPUs"
    )


def _batch_normalisation(
    settings: JobSettings, hosts: int | None, hyperparameters: Mapping[str, Any], entry_point: Any, source_dir: Any
) -> Iterator[str]:
    parameters = settings.model_parallel
    given = [name for name in BATCH_NAMES if _whole(hyperparameters.get(name)) is not None]
    if parameters is None or not given:
        return
    name = given[0]
    per_host = settings.mpi.processes_per_host if settings.mpi else None
    world = (per_host or 1) * (hosts or 1)
    batch, microbatches = _whole(hyperparameters[name]) or 0, parameters.microbatches
    is_trained_whole = world == 1 and microbatches == 1
    seen = batch // microbatches
    if seen >= SMALL_BATCH or is_trained_whole:
        return
    where = first_use(_BATCH_NORM, entry_point, source_dir)
    if where is None or first_use(_OVER_RANKS, entry_point, source_dir) is not None:
        return
    cut = f"{name} {batch}"
    if microbatches > 1:
        cut += f" ÷ microbatches {microbatches}"
    yield (
        f"{where} uses batch normalisation, and each replica normalises over {seen} samples only ({cut}): below "
        f"{SMALL_BATCH} its statistics are unreliable and the model may not converge as on one GPU; raise {name}, or use "
        "GroupNorm or SyncBatchNorm"
    )


def _first(hyperparameters: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    values = (_whole(hyperparameters.get(name)) for name in names)
    return next((value for value in values if value is not None), None)


def _whole(value: Any) -> int | None:
    """Return a positive integer, also from text, or None; hyperparameters of a tuning job are text."""
    if isinstance(value, bool):
        return None
    try:
        number = int(str(value))
    except ValueError:
        return None
    return number if number > 0 else None


def _region_of(bucket: str, session: Any) -> str | None:
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    quick = Config(connect_timeout=2, read_timeout=3, retries={"max_attempts": 1, "mode": "standard"})
    try:
        client = session.boto_session.client("s3", region_name=session.boto_region_name, config=quick)
        answer = client.head_bucket(Bucket=bucket)
    except ClientError as error:  # a refusal names the region too
        answer = error.response
    except BotoCoreError:
        return None
    region = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")
    return str(region) if region else None
