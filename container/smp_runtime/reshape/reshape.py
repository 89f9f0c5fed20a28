"""``smp.reshape``: a running job goes over to other degrees between two steps, without a file."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config import ConfigError, Group, ModelParallelParameters
from smp_config.errors import kind_of
from smp_runtime.checkpoint.memory.copying import Copier
from smp_runtime.checkpoint.memory.known_contents import KnownContents
from smp_runtime.checkpoint.save_partial import Saver
from smp_runtime.data.position import Sources
from smp_runtime.errors import ConnectionLostError, DeadlineError, RankLeftError, SMPError, SMPUserError
from smp_runtime.model.distributed_model import DistributedModel
from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.optim.distributed_optimizer import DistributedOptimizer
from smp_runtime.parameters.deferred_creation import Deferrals, defer_creation
from smp_runtime.reshape.live_loading import LiveLoading
from smp_runtime.reshape.moving import LiveReader
from smp_runtime.reshape.offers import UNSAVED, Catalogue, Offer, exchange_offers
from smp_runtime.step.last_microbatch import LastMicrobatch

if TYPE_CHECKING:
    from smp_runtime.job.session import Session
    from smp_runtime.microbatch_state.blueprint import ParameterShape
    from smp_runtime.pipeline.partition.assignment import Assignment

logger = logging.getLogger("smp")

#: Settings that a job keeps: the form of the weights, and how its processes met.
FIXED = (
    "fp16",
    "bf16",
    "ddp",
    "ddp_port",
    "ddp_dist_backend",
    "host_collectives",
    "horovod",
    "delayed_parameter_initialization",
)


@dataclass
class Reshaped:
    """What a job has gone over to.

    Attributes:
        parameters: all settings that are in force now.
        seconds: it took, on this rank.
        received_bytes: that came to this rank from others.
    """

    parameters: dict[str, Any]
    seconds: float = 0.0
    received_bytes: int = 0


def reshape(session: Session, parameters: Mapping[str, Any]) -> Reshaped:
    """Go on with other degrees on the same ranks; every rank calls it, with the same settings, between two steps.

    Weights, float32 weights, optimizer state and buffers move from the ranks that have them to those that want them, each
    element once. What ``smp.data`` reads goes on at the same place, with the same number of samples in all ranks' batches
    together. Wrapped model and optimizer stay the same objects, with schedulers, hooks, modes and the loss scale; parameters
    are new ones. Where pipeline stages change, the last training step is traced without values to decide the partition.
    Random numbers go on from those of each rank.

    Args:
        parameters: settings that change, such as ``{"pipeline_parallel_degree": 2, "tensor_parallel_degree": 1}``.

    Returns:
        What the job has gone over to.

    Raises:
        ConfigError: settings that do not fit each other or the number of ranks.
        SMPUserError: a setting that cannot change, or a model or a data set that cannot be divided otherwise. The job is as it
            was, on all ranks.

    Example:
        >>> reshaped = smp.reshape({"pipeline_parallel_degree": 1, "tensor_parallel_degree": 1})
    """
    began = time.perf_counter()
    ranks = session.ranks
    with ranks.control.doing("smp.reshape"):
        wanted = _checked(session, parameters)
        model, optimizer = _trained(session, wanted)
        if wanted.to_mp_parameters() == ranks.cfg.to_mp_parameters():
            return Reshaped(wanted.to_mp_parameters())
        Saver.of(session).wait()
        offer, problem = Offer(), ""
        if model is not None:
            model._replicas.agree()  # noqa: SLF001 - what one rank has of a replica stands for all that have it
            try:
                offer = Offer.of(session, model, optimizer)
            except SMPUserError as error:
                problem = str(error)
        _agree(session, problem)
        former, outcome = ranks.cfg, Reshaped(wanted.to_mp_parameters())
        if model is None:
            session.regroup(wanted)
        else:
            found = exchange_offers(session, model, optimizer, offer)
            move = _Move(session, model, optimizer, offer, found, outcome)
            try:
                move.to(wanted)
            except (DeadlineError, RankLeftError, ConnectionLostError):
                raise  # no other rank could go back together with this one
            except (SMPError, ConfigError):
                # Nothing has been moved yet, and all ranks have met the same.
                logger.warning("the job goes on as it was")
                move.to(former)
                move.fill()
                raise
            move.fill()
        for source in Sources.of(ranks).alive():
            source.regroup()
        if (copier := ranks.kept(Copier)) is not None:
            copier.regrouped()
        outcome.seconds = time.perf_counter() - began
        if ranks.rank == 0:
            logger.info("the job goes on with %s; it took %.2f s", json.dumps(dict(parameters)), outcome.seconds)
        return outcome


class _Move:
    """One move of a model and its optimizer to other degrees."""

    def __init__(
        self,
        session: Session,
        model: DistributedModel,
        optimizer: DistributedOptimizer | None,
        offer: Offer,
        found: Catalogue,
        outcome: Reshaped,
    ) -> None:
        self._session = session
        self._model = model
        self._optimizer = optimizer
        self._offer = offer
        self._found = found
        self._outcome = outcome
        self._groups = len(optimizer.param_groups) if optimizer is not None else 0
        self._assignment = model.assignment
        self._stages = session.ranks.size(Group.PP)
        self._degree = session.ranks.size(Group.TP)
        own = {id(part) for part in model.blueprint.modules()}
        #: Paths of the script's own modules. Tensor parallelism has put modules at other paths, some with own buffers.
        self._own = {path for path, part in model.module.named_modules(remove_duplicate=False) if id(part) in own}
        self._loading: LiveLoading
        self._reader: LiveReader

    def to(self, parameters: ModelParallelParameters) -> None:
        """Lay the model out for these degrees; nothing moves yet.

        Raises:
            CheckpointError: it has other tensors then.
            SMPUserError: it cannot be laid out so.
        """
        session, model, optimizer = self._session, self._model, self._optimizer
        self._say_lost_hooks()
        KnownContents.forget(model)
        model.leave_stages()
        if optimizer is not None:
            optimizer.release()
        session.regroup(parameters)
        with _same_random_numbers(session), defer_creation(session.ranks.keep(Deferrals, Deferrals)):
            # In half precision training, the current types are not the script's: its weights begin in float32.
            types_stay = not model.precision.is_half
            module = model.blueprint.build(_parameter, torch.zeros_like, types_stay=types_stay)
            self._follow_buffers(module)
            self._follow_flags(module)
        with _same_random_numbers(session):
            model.rebuild(module)
            self._follow_flags(model.module)  # by the names of distributed modules, which the script's has not
            reader = LiveReader(session.ranks, self._found, self._offer)
            if optimizer is not None:
                optimizer.take_over(model, LiveLoading(session, model, None, reader).groups(self._groups))
            loading = LiveLoading(session, model, optimizer, reader)
            self._partition()
        self._loading, self._reader = loading, reader

    def fill(self) -> None:
        """Move all tensors to where they are wanted."""
        self._loading.load_tensors()
        self._outcome.received_bytes = self._reader.received

    def _say_lost_hooks(self) -> None:
        """Warn of lost hooks on gradients of distributed modules; the new layout may have other parameters."""
        names = self._model.blueprint.listened_elsewhere(self._model.module)
        if names and self._session.ranks.rank == 0:
            logger.warning(
                "hooks were registered on gradients of %d parameters of distributed modules (%s), which smp.reshape makes anew: "
                "they are not called any more; register them again on the parameters of the wrapped model",
                len(names),
                ", ".join(names[:3]),
            )

    def _follow_buffers(self, module: nn.Module) -> None:
        """Let the script's modules have the buffers that they have by now, without values: new ones, and others' shape and type."""
        for name, record in self._found.manifest.buffers.items():
            path, _, leaf = name.rpartition(".")
            if path not in self._own:
                continue
            owner, dtype = module.get_submodule(path), getattr(torch, record.dtype)
            former = owner._buffers.get(leaf)
            if former is not None and (tuple(former.shape), former.dtype) == (record.shape, dtype):
                continue
            made = torch.zeros(record.shape, dtype=dtype, device="cpu")
            if leaf not in owner._buffers:
                vars(owner).pop(leaf, None)
                owner.register_buffer(leaf, made, persistent=(UNSAVED, name) not in self._found.dtypes)
            owner._buffers[leaf] = made
            for part in module.modules() if former is not None else ():  # under its other names, too
                for key in [key for key, buffer in part._buffers.items() if buffer is former]:
                    part._buffers[key] = made

    def _follow_flags(self, module: nn.Module) -> None:
        """Freeze and unfreeze parameters as in the former layout; a strategy may have replaced the script's own."""
        made = dict(module.named_parameters(remove_duplicate=False))
        for name, record in self._found.manifest.parameters.items():
            for known in (name, *record.aliases):
                parameter = made.get(known)
                if parameter is None:
                    continue
                if parameter.requires_grad != record.trained:
                    parameter.requires_grad_(record.trained)

    def _partition(self) -> None:
        """Decide which stage gets which module, so that whatever the script reads next is in its place.

        Raises:
            SMPUserError: the model cannot be partitioned for this number of stages; the same on all ranks.
        """
        model, ranks = self._model, self._session.ranks
        if model.partitioned:
            return
        if (assignment := self._same_stages()) is not None:
            model.adopt(assignment)
            return
        again = ranks.keep(LastMicrobatch, LastMicrobatch).again()
        with torch.enable_grad():
            try:
                model.partition(again, first_step=False)
            except Exception as error:  # decided on one rank, and so the same on all
                if ranks.rank == 0:
                    logger.warning(
                        "the step cannot be traced without the values of a batch (%s: %s), so the model is partitioned by its "
                        "modules alone, as with skip_tracing",
                        type(error).__name__,
                        str(error).partition("\n")[0],
                    )
                model.partition(None, first_step=False)

    def _same_stages(self) -> Assignment | None:
        """Return the former partition, if it can stay; else None."""
        ranks, former = self._session.ranks, self._assignment
        if former is None or (ranks.size(Group.PP), ranks.size(Group.TP)) != (self._stages, self._degree):
            return None
        try:
            former.check(self._model.module, self._stages)
        except SMPUserError:
            return None
        return former


def _parameter(shape: ParameterShape) -> nn.Parameter:
    """Return a parameter; inside :func:`defer_creation` its values are created later."""
    made = nn.Parameter(torch.zeros(shape.shape, dtype=shape.dtype, device="cpu"), shape.requires_grad)
    if shape.kind is not nn.Parameter:
        made.__class__ = shape.kind
    made.__dict__.update(shape.attributes)
    return made


def _checked(session: Session, given: Mapping[str, Any]) -> ModelParallelParameters:
    """Return all settings after checking them; the result is the same on every rank.

    Raises:
        ConfigError: they are invalid.
        SMPUserError: one of them cannot change, or the ranks want different ones.
    """
    if not isinstance(given, Mapping):
        raise SMPUserError(
            f"smp.reshape() got {given!r}, {kind_of(given)}; pass a dictionary of parameters such as "
            '{"pipeline_parallel_degree": 2}',
            code="SMP314",
        )
    before = {k: v for k, v in session.ranks.cfg.to_mp_parameters().items() if k != "partitions"}
    settings = dict(given)
    if "partitions" in settings:
        settings["pipeline_parallel_degree"] = settings.pop("partitions")
    everyone = list(range(session.ranks.control.size))
    texts = session.ranks.control.allgather(json.dumps(settings, sort_keys=True, default=repr), everyone)
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise SMPUserError(
                f"rank {rank} called smp.reshape({text}), but rank 0 smp.reshape({texts[0]}); all ranks change to the same",
                code="SMP314",
            )
    wanted = ModelParallelParameters.from_mp_parameters({**before, **settings})
    after = wanted.to_mp_parameters()
    if fixed := [name for name in FIXED if before.get(name) != after.get(name)]:
        raise SMPUserError(
            f"smp.reshape cannot change {', '.join(fixed)} of a job that runs; save a checkpoint, and resume it in a job that has "
            "the other setting",
            code="SMP314",
        )
    wanted.topology(session.ranks.control.size)  # raises an error if the degrees do not fit
    return wanted


def _trained(
    session: Session, wanted: ModelParallelParameters
) -> tuple[DistributedModel | None, DistributedOptimizer | None]:
    """Return the model and the optimizer to move.

    Raises:
        SMPUserError: one of them cannot move, or this is not between two steps.
    """
    models = [model for model in session.models if isinstance(model, DistributedModel)]
    optimizers = [found for found in session.optimizers if isinstance(found, DistributedOptimizer)]
    step = session.ranks.step
    if step.microbatch is not None or step.is_tracing:
        raise SMPUserError(
            "smp.reshape was called inside a step; call it after optimizer.step(), before the next step", code="SMP314"
        )
    if len(models) > 1 or len(optimizers) > 1:
        raise SMPUserError(
            f"smp.reshape moves one wrapped model and one wrapped optimizer, but the script holds {len(models)} and "
            f"{len(optimizers)}",
            code="SMP314",
        )
    model = models[0] if models else None
    optimizer = optimizers[0] if optimizers else None
    problem = ""
    for source in Sources.of(session.ranks).alive():
        problem = problem or source.why_not(wanted)
    if model is not None:
        problem = problem or _why_not(session, model, wanted)
    _agree(session, problem)
    return model, optimizer


def _why_not(session: Session, model: DistributedModel, wanted: ModelParallelParameters) -> str:
    """Return why a model cannot get another layout; empty if it can."""
    if not model.partitioned:
        return "the model is not partitioned yet; call smp.reshape after the first step, or give smp.init the other degrees"
    if model.is_whole_copy or model._placed.is_away:  # noqa: SLF001
        return "model.cpu() has moved the model away; call model.cuda() first"
    if model.blueprint.problem:
        return f"the model cannot be built anew: {model.blueprint.problem}"
    known = {id(record.parameter) for record in model.registry}
    if added := [name for name, parameter in model.module.named_parameters() if id(parameter) not in known]:
        return (
            f"the model got {len(added)} parameters after it was wrapped ({', '.join(added[:3])}), which it would lose; add them "
            "before smp.DistributedModel"
        )
    degree = session.ranks.size(Group.TP)
    own = next((type(part).__name__ for part in model.blueprint.modules() if isinstance(part, DistributedModule)), "")
    if own and wanted.tensor_parallel_degree != degree:
        return (
            f"the script has created a {own}, whose parts are those of tensor_parallel_degree {degree}; build ordinary modules "
            "inside smp.tensor_parallelism(), which are divided when the model is laid out"
        )
    if not wanted.auto_partition and wanted.pipeline_parallel_degree not in (1, session.ranks.size(Group.PP)):
        return (
            f"the script has put modules on {session.ranks.size(Group.PP)} stages by hand (auto_partition is false), which says "
            f"nothing of {wanted.pipeline_parallel_degree}; set auto_partition to true as well"
        )
    return ""


def _agree(session: Session, problem: str) -> None:
    """Raise SMPUserError on all ranks if any of them has a problem."""
    everyone = list(range(session.ranks.control.size))
    for rank, why in enumerate(session.ranks.control.allgather(problem, everyone)):
        if why:
            raise SMPUserError(
                f"smp.reshape is not possible: {why}" + (f" (rank {rank})" if rank else ""), code="SMP314"
            )


@contextmanager
def _same_random_numbers(session: Session) -> Iterator[None]:
    """Restore the random generators after the block, so that the same numbers are drawn again."""
    device = session.ranks.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
