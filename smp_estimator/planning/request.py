"""The request for a plan: a model, a cluster, settings and a script, checked and completed from the catalogue."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_config import ConfigError, ModelParallelParameters, smddp
from smp_config.errors import kind_of, suggest
from smp_config.machine.instances import instance, instances, refuse_neuron
from smp_config.version2.which_version import refuse_version_2
from smp_estimator.planning.batches import require_one_sample
from smp_estimator.planning.known_models import named_shape, short_name
from smp_estimator.planning.model_config import read_shape, shape_of
from smp_estimator.planning.model_shape import SHAPES, ModelShape
from smp_estimator.planning.rates.fitted import FITTED
from smp_estimator.planning.rates.kernel_rates import KernelRates
from smp_records.rate_card import RateCard

if TYPE_CHECKING:
    from smp_config.machine.instances import Instance

#: Part of its published peak that a GPU reaches in the arithmetic of a step, if none is given. Narayanan et al. 2021
#: measured 44–52 % on A100, with everything else of a step included.
UTILISATION = 0.5

#: Bytes of optimizer state per parameter, in fp32: two moments, one, or none. Muon has one of hidden matrices, and AdamW's two of
#: all others: :func:`state_bytes`.
OPTIMIZER_BYTES = {
    "adam": 8,
    "adamw": 8,
    "lamb": 8,
    "lans": 8,
    "lars": 4,
    "momentum": 4,
    "muon": 4,
    "novograd": 4,
    "sgd": 0,
}


def state_bytes(optimizer: str, *, matrix: bool) -> int:
    """Return the bytes of optimizer state per element of a parameter, in fp32; ``matrix``: see :class:`Weight`."""
    return OPTIMIZER_BYTES["adamw" if optimizer == "muon" and not matrix else optimizer]


#: Checkpointing that keeps the results of some operations of each layer, and computes the others again.
SELECTIVE = "selective"

#: Engines whose memory a plan knows: this library, and PyTorch's FSDP2 with fp32 parameters that are gathered in bf16.
ENGINES = ("smp", "fsdp2")


@dataclass(frozen=True)
class Workload:
    """The training script's properties that the arithmetic needs and ``mp_parameters`` lacks.

    Attributes:
        batch: samples that a rank (with ``prescaled_batch`` a tensor parallel group) reads at a time.
        accumulation: backward passes per optimizer step.
        activation_checkpointing: None, ``"each"``, ``"contiguous"`` or ``"group_N"``, the ``strategy`` of
            ``smp.set_activation_checkpointing`` over the model's layers; or ``"selective"``, if the script itself keeps the
            results of every second matrix product and of attention.
        engine: ``"smp"``, or ``"fsdp2"`` for a job of PyTorch's FSDP2 with fp32 parameters.
        compiled: each layer is compiled, so that it keeps only what backward reads.
        float8: matrix products of the layers are in float8, as by torchao; it changes the time only.
        async_tensor: messages of tensor parallelism travel beside the products; it changes the time only.
        rates: parts of its peaks that the GPU's kernels reach, or a rate card, or the path of one that ``smp-estimator calibrate``
            wrote; None: one part for
            everything, ``utilisation``, or for the engine ``"fsdp2"`` those that were fitted to published measurements.
        failures_per_gpu_hour: failures of the job for each of its GPUs; None: as the training of Llama 3 had.
        save_interval: seconds of work between two checkpoints; None: the best.
        restart_seconds: from a failure to the first step after it; None: an assumption.
        compiled_loss: the loss is compiled too, and has no fp32 logits; known for the engine ``"fsdp2"``.
        fused_attention: attention that keeps no [seq, seq] maps.
        dropout: the model drops activations and keeps the masks.
        optimizer: one of :data:`OPTIMIZER_BYTES`.
        distribute_embedding: tensor parallelism divides the word embedding; sharded data parallelism with tensor
            parallelism always enables it.
        autocast: the script trains fp32 parameters under ``torch.autocast`` in a half precision. Matrices then compute
            with half precision copies of their weights, and the loss is computed in fp32.
        fp32_loss: the script computes the loss on logits converted to fp32, as the models of Transformers do. If
            it is not given, it is assumed for a configuration or module of Transformers.
        gradient_as_bucket_view: one set of reduction buffers stays for all steps.
        samples: of the data set; None if its size is not known, or follows from ``tokens``.
        tokens: of the data set, before samples are cut or filled to the length of a sequence.
        epochs: passes through the data set.
        steps: optimizer steps of the whole training, if they define its end instead of ``epochs``.
        step_seconds: measured time of an optimizer step; None for the plan's own estimate.
        utilisation: part of its published peak that a GPU reaches in the arithmetic of a step.
        prices: of one instance in US dollars per hour, by its type; they replace the catalogue's.
        batch_source: the origin of ``batch`` if it was not given, in words.
    """

    batch: int = 1
    accumulation: int = 1
    activation_checkpointing: str | None = None
    fused_attention: bool = True
    dropout: bool = True
    optimizer: str = "adam"
    distribute_embedding: bool = False
    autocast: bool = False
    fp32_loss: bool = False
    gradient_as_bucket_view: bool = False
    engine: str = "smp"
    compiled: bool = False
    compiled_loss: bool = False
    float8: bool = False
    async_tensor: bool = False
    rates: KernelRates | None = None
    failures_per_gpu_hour: float | None = None
    save_interval: float | None = None
    restart_seconds: float | None = None
    samples: int | None = None
    tokens: int | None = None
    epochs: int = 1
    steps: int | None = None
    step_seconds: float | None = None
    utilisation: float = UTILISATION
    prices: Mapping[str, float] = field(default_factory=dict)
    batch_source: str = ""

    def __post_init__(self) -> None:
        for name in ("samples", "tokens", "epochs", "steps"):
            value = getattr(self, name)
            if name != "epochs" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"{name} is {value!r} ({type(value).__name__}); steps are counted from it: give a whole number of 1 or more",
                    code="SMP110",
                )
        if str(self.optimizer) not in OPTIMIZER_BYTES:
            raise ConfigError(
                f"optimizer is {self.optimizer!r}; its state per parameter is unknown: use one of {', '.join(OPTIMIZER_BYTES)}",
                code="SMP110",
            )
        if self.engine not in ENGINES:
            raise ConfigError(
                f"engine is {self.engine!r}{suggest(str(self.engine), ENGINES)}; the plan knows the memory of "
                f"{' and '.join(ENGINES)}: use one of them",
                code="SMP110",
            )
        self.checkpointed_layers(1)
        self._check_steps()
        self._check_utilisation()
        self._check_failures()
        self._check_prices()

    def _check_steps(self) -> None:
        if self.steps is not None and self.epochs != 1:
            raise ConfigError(
                f"steps is {self.steps} and epochs is {self.epochs}; each says when the training ends: give one of them (with the "
                "size of the data set a plan says how many epochs the steps are)",
                code="SMP110",
            )
        seconds = self.step_seconds
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf
        ):
            raise ConfigError(
                f"step_seconds is {seconds!r}; it is the time from one optimizer step to the next: give more than 0, or leave it "
                "out for the plan's own estimate",
                code="SMP110",
            )

    def _check_failures(self) -> None:
        for name in ("failures_per_gpu_hour", "save_interval", "restart_seconds"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < math.inf):
                raise ConfigError(
                    f"{name} is {value!r}; hours with failures are computed from it: give more than 0, or leave it out",
                    code="SMP110",
                )

    def _check_utilisation(self) -> None:
        part = self.utilisation
        if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
            raise ConfigError(
                f"utilisation is {part!r}; it is the part of its peak that a GPU reaches: give more than 0 and at most 1, for "
                f"example {UTILISATION}",
                code="SMP110",
            )

    def _check_prices(self) -> None:
        if not isinstance(self.prices, Mapping):
            raise ConfigError(
                f"prices is {self.prices!r}, {kind_of(self.prices)}; they are looked up by the type of the instance: write "
                'for example {"ml.p4d.24xlarge": 25.0}, in US dollars per hour',
                code="SMP110",
            )
        for name, price in self.prices.items():
            if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < math.inf:
                raise ConfigError(
                    f"the price of {name} is {price!r}; it is what one instance costs in US dollars per hour: give more than 0, "
                    "or leave it out for the catalogue's",
                    code="SMP110",
                )

    def require_one_sample(self, sequence: int) -> None:
        """Raise ConfigError if the data set is given in tokens, and has fewer than one sample."""
        if self.samples is None and self.tokens is not None:
            require_one_sample(self.tokens, sequence)

    def checkpointed_layers(self, layers: int) -> int:
        """Return the number of layers that are recomputed together, 0 if none are.

        Raises:
            ConfigError: an unknown strategy.
        """
        strategy = self.activation_checkpointing
        if strategy is None:
            return 0
        if strategy in ("each", SELECTIVE):
            return 1
        if strategy == "contiguous":
            return layers
        group = re.fullmatch(r"group_([1-9]\d*)", str(strategy))
        if group is None:
            raise ConfigError(
                f"activation_checkpointing is {strategy!r}; it is the strategy over the model's layers: use 'each', "
                "'contiguous', 'group_2' (or another number), 'selective', or None",
                code="SMP110",
            )
        return min(layers, int(group[1]))


@dataclass(frozen=True)
class Request:
    """All inputs of a plan, so that a plan can be made again with one input changed."""

    shape: ModelShape
    instance_type: str
    instance_count: int
    processes_per_host: int
    parameters: ModelParallelParameters
    workload: Workload
    gpu_memory_bytes: int | None
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def usd_per_hour(self) -> float | None:
        """Return the price of one instance: the one given for its type, else the catalogue's; None without either."""
        known = instance(self.instance_type)
        return self.workload.prices.get(self.instance_type, known.usd_per_hour if known else None)

    @property
    def activation_element_bytes(self) -> int:
        """Return the bytes of an element in matrix multiplications and their results."""
        is_half = self.parameters.fp16 or self.parameters.bf16 or self.workload.autocast
        return 2 if is_half else 4

    @property
    def residual_element_bytes(self) -> int:
        """Return the bytes of an element between layers: under autocast, sums and norms stay in fp32."""
        return 4 if self.workload.autocast else self.activation_element_bytes

    @property
    def world(self) -> int:
        """Return the number of the job's processes."""
        return self.instance_count * self.processes_per_host

    @property
    def uses_smddp(self) -> bool:
        """Return whether the SMDDP all-gather is used: requested, or automatic if the documentation supports it."""
        if self.parameters.sharded_data_parallel_degree == 1:
            return False
        return smddp.is_chosen(self.parameters, self.instance_type, self.instance_count)

    def changed(self, settings: Mapping[str, Any] | None = None, **fields: Any) -> Request:
        """Return the request with other ``settings`` (of mp_parameters) and other fields of request or workload."""
        parameters = self.parameters
        if settings:
            # Only what was set: a default may depend on the settings that change.
            given = parameters.model_dump(by_alias=True, exclude_unset=True)
            parameters = ModelParallelParameters.from_mp_parameters({**given, **settings})
        own = {name: value for name, value in fields.items() if name in Request.__dataclass_fields__}
        script = {name: value for name, value in fields.items() if name not in own}
        workload = dataclasses.replace(self.workload, **script)
        return dataclasses.replace(self, **{"parameters": parameters, "workload": workload, **own})


def request_for(
    model: Any,
    instance_type: str,
    instance_count: int,
    parameters: ModelParallelParameters | Mapping[str, Any] | str | None,
    *,
    sequence: int | None,
    processes_per_host: int | None,
    gpu_memory_bytes: int | None,
    environment: Mapping[str, str] | None,
    workload: Mapping[str, Any],
) -> Request:
    """Settle the arguments of :func:`smp_estimator.planning.plan`; raise ConfigError if one cannot be used."""
    if isinstance(instance_count, bool) or not isinstance(instance_count, int) or instance_count < 1:
        raise ConfigError(
            f"instance_count is {instance_count!r}; it is a number of instances: set it to 1 or more", code="SMP110"
        )
    refuse_neuron(str(instance_type))
    known = instance(instance_type)
    _require_type("processes_per_host", processes_per_host, int, "a number of processes")
    _require_type("gpu_memory_bytes", gpu_memory_bytes, int | float, "a number of bytes")
    _require_type("environment", environment, Mapping, "names with their values")
    if processes_per_host is None:
        if known is None:
            raise ConfigError(
                f"instance_type {instance_type!r} is not in the catalogue of GPU instances, so its number of GPUs is "
                "unknown; give processes_per_host (and gpu_memory_bytes for a verdict)",
                code="SMP110",
            )
        processes_per_host = known.gpus
    elif processes_per_host < 1 or (known is not None and processes_per_host > known.gpus):
        have = f"{instance_type} has {known.gpus} GPUs" if known else "every host starts at least one"
        raise ConfigError(
            f"processes_per_host is {processes_per_host}, but {have} and each process needs its own; set it to "
            f"{known.gpus if known else 1}",
            code="SMP110",
        )
    if gpu_memory_bytes is None:
        gpu_memory_bytes = known.gpu_memory_bytes if known else None
    elif isinstance(gpu_memory_bytes, bool) or not 0 < gpu_memory_bytes < math.inf:
        otherwise = f"the catalogue's {known.gpu_memory_bytes}" if known else "a plan without a verdict"
        raise ConfigError(
            f"the memory of a GPU is {gpu_memory_bytes} bytes; the plan is compared with what a GPU has: give more than 0, "
            f"or leave it out for {otherwise}",
            code="SMP110",
        )
    if not isinstance(parameters, ModelParallelParameters):
        refuse_version_2(parameters, "a plan")
        parameters = ModelParallelParameters.from_mp_parameters({"ddp": True} if parameters is None else parameters)
    script = dict(workload)
    if script.get("batch") is None:
        script["batch"] = parameters.microbatches
        many = parameters.microbatches > 1
        script["batch_source"] = "one sample per microbatch, as none was given" if many else "1, as none was given"
    if script.get("fp32_loss") is None:
        script["fp32_loss"] = is_of_transformers(model)
    script["rates"] = _rates_given(script.get("rates"), known, parameters)
    described = _workload(script)
    _refuse_two_precisions(described, parameters)
    _refuse_unknown_types(described.prices, instance_type)
    shape = shape_given(model, sequence)
    described.require_one_sample(shape.sequence)
    return Request(
        shape=shape,
        instance_type=instance_type,
        instance_count=instance_count,
        processes_per_host=processes_per_host,
        parameters=parameters,
        workload=described,
        gpu_memory_bytes=gpu_memory_bytes,
        environment=tuple(sorted((environment or {}).items())),
    )


def _require_type(name: str, value: Any, kind: Any, expected: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise ConfigError(
            f"{name} is {value!r:.80}, {kind_of(value)}; it is {expected}: give such, or leave it out", code="SMP110"
        )


def _rates_given(given: Any, known: Instance | None, parameters: ModelParallelParameters) -> KernelRates | None:
    """Return rates that were given as such, as a rate card, or as the file of one; None if none were."""
    if given is None or isinstance(given, KernelRates):
        return given
    if isinstance(given, str | Path):
        try:
            given = RateCard.from_json(Path(given).read_bytes(), str(given))
        except OSError as error:
            raise ConfigError(
                f"rates is {str(given)!r}, which cannot be read ({error.strerror}); name a card that smp-estimator calibrate wrote",
                code="SMP110",
            ) from None
    if not isinstance(given, RateCard):
        raise ConfigError(
            f"rates is {given!r:.80}, {kind_of(given)}; give KernelRates, a RateCard, or the path of one", code="SMP110"
        )
    short, long = ("fp16", "float16") if parameters.fp16 else ("bf16", "bfloat16")
    peak = None if known is None else known.gpu_facts.tflops(short)
    if known is None or peak is None or known.memory_gb_per_s is None:
        raise ConfigError(
            "rates are parts of a GPU's published peaks, and none are known for the instance type; leave rates out",
            code="SMP110",
        )
    return KernelRates.of_card(given, FITTED, long, 1e12 * peak, 1e9 * known.memory_gb_per_s)


def _refuse_two_precisions(workload: Workload, parameters: ModelParallelParameters) -> None:
    if workload.autocast and (parameters.bf16 or parameters.fp16):
        name = "bf16" if parameters.bf16 else "fp16"
        raise ConfigError(
            f'autocast is True, and the parameters have "{name}"; under autocast parameters stay in fp32, with "{name}" they are '
            f"in half precision: leave autocast out, or remove {name}",
            code="SMP110",
        )


def _refuse_unknown_types(prices: Mapping[str, float], instance_type: str) -> None:
    names = [known.name for known in instances()]
    allowed = {*names, instance_type}
    for name in prices:
        if name not in allowed:
            raise ConfigError(
                f"prices has {name!r}{suggest(str(name), names)}; prices are looked up by the type of the instance, and the "
                "catalogue has none of this name: use one of smp_estimator.planning.instances()",
                code="SMP110",
            )


def shape_given(model: Any, sequence: int | None) -> ModelShape:
    """Return the shape of a model that is given in any form that ``plan()`` accepts."""
    _require_type("sequence", sequence, int, "a whole number of tokens")
    if isinstance(model, int | float):
        return ModelShape.from_parameter_count(model, sequence=sequence or 2048)
    if isinstance(model, ModelShape):
        shape = model
    elif isinstance(model, Mapping):
        shape = shape_of(model)
    elif isinstance(model, str | Path):
        shape = _read_or_named_shape(model)
    elif hasattr(model, "model_type") and callable(getattr(model, "to_dict", None)):
        shape = shape_of(model.to_dict(), type(model).__name__)
    else:
        return ModelShape.from_module(model, sequence=sequence)
    return shape.with_sequence(sequence)


def _read_or_named_shape(model: str | Path) -> ModelShape:
    """Return the shape in a file, or that of a known model, whose name comes before a file's.

    A name of the model hub may be the path of a folder too, which then counts.
    """
    is_name = isinstance(model, str) and "/" not in model and short_name(model) is not None
    if isinstance(model, Path) or (not is_name and Path(model).exists()):
        return read_shape(Path(model))
    return named_shape(model)


def is_of_transformers(model: Any) -> bool:
    """Return whether a model is given by a configuration of Transformers, or is a module that has one."""
    if isinstance(model, ModelShape | int | float):
        return False
    # A text is the name of a published shape, or the path of a configuration.
    if isinstance(model, str) and model in SHAPES:
        return False
    if isinstance(model, Mapping | str | Path):
        return True
    return hasattr(getattr(model, "config", model), "model_type")


def _workload(fields: Mapping[str, Any]) -> Workload:
    known = Workload.__dataclass_fields__
    for name in fields:
        if name not in known:
            raise ConfigError(
                f"plan() has no argument {name!r}{suggest(name, known)}; the script is described with {', '.join(known)}",
                code="SMP110",
            )
    return Workload(**fields)
