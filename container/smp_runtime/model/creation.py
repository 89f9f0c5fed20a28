"""Contexts in which a script builds its model: ``smp.model_creation``, ``smp.delay_param_initialization``; ``smp.compile``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config.errors import kind_of
from smp_runtime.errors import SMPUserError
from smp_runtime.job import session as sessions
from smp_runtime.microbatch_state import compiled_blocks
from smp_runtime.module_conversion import scopes
from smp_runtime.parameters.deferred_creation import Deferrals, defer_creation, unchanged_default_dtype
from smp_runtime.pipeline.partition.manual_stages import ManualAssignment

if TYPE_CHECKING:
    from smp_runtime.job.session import Session


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Create a model without memory for its parameters; ``smp.DistributedModel`` computes them, with the same values.

    Operations on tensors inside are recorded and run later, so the model's constructor must not read values
    (``item()``, ``if tensor: …``). Inside another such context it changes nothing.

    Args:
        enabled: False creates it as usual.

    Example:
        >>> with smp.delay_param_initialization():
        ...     model = nn.Linear(4096, 4096)  # no memory yet
    """
    if not enabled:
        yield
        return
    deferrals = sessions.current_session().ranks.keep(Deferrals, Deferrals)
    with defer_creation(deferrals):
        yield


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tensor_parallel_config: Any
) -> Iterator[None]:
    """Create the model's parameters in ``dtype``, and later if ``delayed_parameter_initialization`` is set.

    Args:
        tensor_parallelism: distribute the supported modules created inside, as ``smp.tensor_parallelism`` does.
        dtype: floating point type of new parameters; None means PyTorch's default. Under ``fp16`` or ``bf16`` the
            float32 weights are the better start: they become the master weights unrounded.
        tensor_parallel_config: arguments of the distributed modules; not used without tensor parallelism.

    Raises:
        SMPUserError: ``dtype`` is no floating point type, or an unknown argument.

    Example:
        >>> with smp.model_creation(tensor_parallelism=True):
        ...     model = nn.Linear(64, 64)
    """
    if dtype is not None and not dtype.is_floating_point:
        raise SMPUserError(
            f"model_creation got dtype={dtype}; parameters are floating point: use for example torch.float16",
            code="SMP303",
        )
    with (
        unchanged_default_dtype(),
        scopes.tensor_parallelism(tensor_parallelism, **tensor_parallel_config),
        delay_param_initialization(enabled=sessions.current_session().ranks.cfg.delayed_parameter_initialization),
    ):
        if dtype is not None:
            torch.set_default_dtype(dtype)
        yield


def partition(index: int) -> contextlib.AbstractContextManager[None]:
    """Assign modules that are constructed inside to pipeline stage ``index``, if ``auto_partition`` is off.

    Contexts may be nested; the innermost counts. Modules outside all of them belong to ``default_partition``.

    Args:
        index: of the stage, from 0.

    Raises:
        SMPUserError: no such stage.

    Example:
        >>> with smp.partition(0):  # "auto_partition": false; the first stage
        ...     encoder = nn.Linear(64, 64)
    """
    return manual_of(sessions.current_session()).partition(index)


def set_partition(module: nn.Module, pp_rank: int) -> None:
    """Put a module, and those inside it that are not set themselves, on a pipeline stage; also in an automatic partition.

    Call it before the first step, which decides the partition. It wins over ``smp.partition`` contexts, and the last
    call for a module over earlier ones.

    Args:
        module: of the model that is or will be wrapped, or the wrapped model itself.
        pp_rank: stage, from 0 to ``smp.pp_size() - 1``.

    Raises:
        SMPUserError: no such stage, no module, or a module of a model that is partitioned already, with another stage.

    Example:
        >>> decoder = nn.Linear(64, 64)
        >>> smp.set_partition(decoder, smp.pp_size() - 1)
    """
    session = sessions.current_session()
    for model in session.models:
        if module is model:
            module = model.module
        if model.assignment is None:
            continue
        path = next((path for path, part in model.module.named_modules() if part is module), None)
        if path is None:
            continue
        stage = model.assignment.stage_of(path)
        if stage == pp_rank:
            return
        raise SMPUserError(
            f"smp.set_partition put {f'module {path!r}' if path else 'the model'} on stage {pp_rank}, but it lies on stage {stage} "
            "already: the model was partitioned in its first step, or when a checkpoint brought its partition, and parameters do "
            "not move afterwards; call smp.set_partition between smp.DistributedModel and the first step",
            code="SMP303",
        )
    manual_of(session).set_partition(module, pp_rank)


def manual_of(session: Session) -> ManualAssignment:
    """Return the stages that the script has set by hand."""
    ranks = session.ranks

    def make() -> ManualAssignment:
        cfg = ranks.cfg
        return ManualAssignment(cfg.pipeline_parallel_degree, cfg.default_partition or 0, automatic=cfg.auto_partition)

    return ranks.keep(ManualAssignment, make)


def compile(module: nn.Module, backend: str = "inductor") -> None:
    """Compile a module of a model that will be wrapped, on the ranks that have it, by ``torch.compile``.

    Modules of one class share the compiled code. Names of parameters, ``state_dict`` and checkpoints do not change. A module
    that is split over several pipeline stages runs eagerly, and so does one that cannot be compiled. The log reports both.

    Args:
        module: part of a model, before ``smp.DistributedModel``; of an ``nn.ModuleList`` or ``nn.Sequential`` each child counts.
        backend: of ``torch.compile``.

    Raises:
        SMPUserError: it is no module, or part of a wrapped model.

    Example:
        >>> layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        >>> smp.compile(layers)  # before smp.DistributedModel; nothing is compiled before the first step
    """
    if not isinstance(module, nn.Module):
        raise SMPUserError(
            f"smp.compile got {module!r}, {kind_of(module)}; pass a module of the model, such as model.layers",
            code="SMP303",
        )
    for model in sessions.current_session().models if sessions.is_initialized() else []:
        if any(part is module for part in model.module.modules()):
            raise SMPUserError(
                f"smp.compile got {kind_of(module)} of a model that is wrapped already, whose modules have their place; "
                "call it before smp.DistributedModel",
                code="SMP303",
            )
    compiled_blocks.mark(module, backend)
