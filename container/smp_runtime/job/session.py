"""The one state object of a rank: made by :func:`init`, read through :func:`current_session`.

Everything below the façade takes its dependencies as arguments. Only the façade and the classes that a script
uses directly ask for the current session.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from smp_config import ConfigError, Group
from smp_config.errors import kind_of
from smp_config.machine.launchers import SECRET_VARIABLE
from smp_records import rank_record
from smp_records.rank_record import current_record
from smp_runtime.comm.control import ControlPlane, connect
from smp_runtime.comm.groups import ended_on_error
from smp_runtime.comm.messages import Messages
from smp_runtime.comm.waiting import ENDED, FAILED
from smp_runtime.errors import NotInitializedError, SMPUserError
from smp_runtime.job.faults import Injector
from smp_runtime.job.module_manager import ModuleManager
from smp_runtime.job.progress import ProgressReporter
from smp_runtime.job.ranks import PARAMETERS_VARIABLE, Ranks
from smp_runtime.parameters.pending_gather import PendingGathers
from smp_runtime.tensors.determinism import Determinism, TracedFirstStep

if TYPE_CHECKING:
    from torch import nn

    from smp_config import ModelParallelParameters
    from smp_runtime.comm.collectives import Collectives
    from smp_runtime.job.trained import TrainedModel, TrainedOptimizer
    from smp_runtime.parameters.registry import ParameterRecord

logger = logging.getLogger("smp")


def _show_log() -> None:
    """Print the library's log if a script has not set up logging itself."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[smp] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


class Session:
    """A rank's view of its job: its place among the other ranks, and the models and optimizers that it trains.

    Scripts read it as ``smp.state``, and through it :class:`~smp_runtime.job.ranks.Ranks` and the running step.

    Args:
        collectives: the collectives of the strategies; None for those of the backend.

    Attributes:
        messages: the public object messages.
        module_manager: information about distributed modules, for clients.
        has_failed: whether an uncaught exception ends this process.
        at_close: functions run when the session closes, before anything is released, to finish pending work.
        before_step: functions run when a step-decorated function is called, before anything of it.
        arguments: functions that change the arguments of a step. They get and return its arguments in order. They also get
            the axis along which each is divided into microbatches, None for one that is not.
        after_step: functions run when a step has ended and gradients are reduced; they get what it returns.
        before_update: functions run when gradients are reduced and without the loss scale, as the script leaves them; they
            get the optimizer.
        after_update: functions run when a wrapped optimizer has updated, or skipped an update for an overflow; they get the
            optimizer.
        at_leave: functions run after ``at_close``, whether the script still holds its model or not, to end threads and
            connections.
    """

    def __init__(
        self, parameters: ModelParallelParameters, control: ControlPlane, collectives: Collectives | None = None
    ) -> None:
        self.ranks, warning = Ranks.join(parameters, control, collectives)
        if self.ranks.rank == 0 and warning is not None:
            logger.warning(warning)
        self.messages = Messages(control, self.ranks.topology)
        self.progress = ProgressReporter.from_environment(
            enabled=control.rank == 0, device=self.ranks.device, rank=control.rank
        )
        self.module_manager = self.ranks.keep(ModuleManager, ModuleManager)
        self.has_failed = False
        self.before_step: list[Callable[[], None]] = []
        self.arguments: list[Callable[[list[Any], list[int | None]], list[Any]]] = []
        self.after_step: list[Callable[[Any], None]] = []
        self.before_update: list[Callable[[TrainedOptimizer], None]] = []
        self.after_update: list[Callable[[TrainedOptimizer], None]] = []
        self.at_close: list[Callable[[], None]] = []
        self.at_leave: list[Callable[[], None]] = []
        # Lists, not sets: every rank must walk over them in the same order.
        self._models: list[weakref.ref[TrainedModel]] = []
        self._optimizers: list[weakref.ref[TrainedOptimizer]] = []

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return what scripts read through ``smp.state``: an attribute of this rank's place or of the running step."""
            if name == "ranks":  # not joined yet
                raise AttributeError(name)
            holder = self.ranks if hasattr(self.ranks, name) else self.ranks.step
            return getattr(holder, name)

    @property
    def models(self) -> list[TrainedModel]:
        """Return the wrapped models that the script still holds, in the order of wrapping."""
        found = [reference() for reference in self._models]
        return [model for model in found if model is not None]

    @property
    def records(self) -> dict[nn.Parameter, ParameterRecord]:
        """Return names and places of the parameters of all wrapped models.

        If two models share a parameter, the record of the first one is returned.
        """
        records: dict[nn.Parameter, ParameterRecord] = {}
        # Backwards, so that the first model's record of a shared parameter stays.
        for model in reversed(self.models):
            for record in model.registry:
                records[record.parameter] = record
        return records

    @property
    def model(self) -> TrainedModel | None:
        """Return the wrapped model if there is exactly one, else None."""
        models = self.models
        return models[0] if len(models) == 1 else None

    @property
    def optimizer(self) -> TrainedOptimizer | None:
        """Return the optimizer that was wrapped last, or None if the script no longer holds any."""
        optimizers = self.optimizers
        return optimizers[-1] if optimizers else None

    @property
    def optimizers(self) -> list[TrainedOptimizer]:
        """Return the wrapped optimizers that the script still holds, in the order of wrapping."""
        found = [reference() for reference in self._optimizers]
        return [optimizer for optimizer in found if optimizer is not None]

    def adopt_model(self, model: TrainedModel) -> None:
        """Register a model that was just wrapped."""
        # The script decides how long a model lives.
        self._models.append(weakref.ref(model))
        for optimizer in self.optimizers:
            optimizer.bind(model)

    def adopt_optimizer(self, optimizer: TrainedOptimizer) -> None:
        """Register an optimizer that was just wrapped."""
        self._optimizers.append(weakref.ref(optimizer))

    def regroup(self, parameters: ModelParallelParameters) -> None:
        """Change to other degrees, between two steps; every rank calls it, and then places its models anew.

        Raises:
            ConfigError: the number of ranks does not fit.
        """
        self.ranks.regroup(parameters)
        self.messages = Messages(self.ranks.control, self.ranks.topology)
        self.module_manager = self.ranks.keep(ModuleManager, ModuleManager)

    def close(self) -> None:
        """Leave the job: process groups and the control plane are released."""
        self.progress.close(failed=self.has_failed)
        current_record().leave(FAILED if self.has_failed else ENDED)
        failure: Exception | None = None
        for finish in (self._settle, *self.at_close, *self.at_leave):
            try:
                finish()
            except Exception as error:  # the rest is released all the same
                failure = failure or error
        # Who listens mostly has this session in turn, and a group that waits for the collection of garbage may be freed in a fork.
        for heard in (self.before_step, self.arguments, self.after_step, self.before_update, self.after_update):
            heard.clear()
        for ended in (self.at_close, self.at_leave):
            ended.clear()
        # First of all, since taking groups down may wait for others, and they for this rank.
        self.ranks.control.close(FAILED if self.has_failed else ENDED)
        if self.has_failed:
            self.ranks.groups.abandon()
        else:
            self.ranks.groups.close()
        self.ranks.forget()
        if failure is not None:
            raise failure

    def _settle(self) -> None:
        """Wait for pending sends of this rank, which other ranks may still need."""
        if self.has_failed:
            return
        arrivals = self.ranks.kept(PendingGathers)
        if arrivals is not None:
            arrivals.settle()


_session: Session | None = None


def _joined(parameters: ModelParallelParameters) -> tuple[ControlPlane, Collectives | None]:
    from smp_runtime.job.started_alone import require_ranks

    require_ranks(parameters)
    return connect(), None


#: How :func:`init` gets to the other ranks, and what strategies communicate through (None: those of the backend); a rehearsal puts
#: its own way here.
joining: list[Callable[[ModelParallelParameters], tuple[ControlPlane, Collectives | None]]] = [_joined]

#: Run by :func:`init` with the new session: packages above register the work of every job here.
at_init: list[Callable[[Session], None]] = []


def init(config: Mapping[str, Any] | None = None) -> Session:
    """Join the job and build every group; the first thing a script does.

    Args:
        config: settings by their documented names. Values that the job itself carries
            (``SM_HP_MP_PARAMETERS``) win over it. Without either, all degrees are 1.

    Returns:
        The session, which scripts do not need; a second call returns the same.

    Raises:
        ConfigError: a setting that cannot work with this number of processes.

    Example:
        >>> smp.init()  # the settings of the job, or of none
        >>> smp.init({"microbatches": 2})  # in a script that is started without an estimator
    """
    from smp_config import ModelParallelParameters

    if _session is not None:
        return _session
    _show_log()
    carried = os.environ.get(PARAMETERS_VARIABLE)
    from_job = json.loads(carried) if carried else None
    settings = {**_given(config), **_given(from_job)}
    return start(ModelParallelParameters.from_mp_parameters(settings))


def start(parameters: ModelParallelParameters) -> Session:
    """Join the job with settings that are checked already, whatever the job carries.

    Raises:
        ConfigError: a setting that cannot work with this number of processes.
    """
    global _session
    if _session is not None:
        return _session
    _show_log()
    try:
        _session = session = _join(parameters)
    except ConfigError as error:
        # It is a setting that has to change, so the frames below do not help.
        raise error.with_traceback(None) from None
    atexit.register(shutdown)
    try:
        _begin(session, parameters)
    except BaseException:
        # Also after Ctrl-C: the other ranks must hear that this one leaves, or they wait until their deadline.
        session.has_failed = True
        with contextlib.suppress(Exception):  # the first error is the one to raise
            shutdown()
        raise
    # What these have registered is called after it, so that libraries are still there when the session closes.
    atexit.unregister(shutdown)
    atexit.register(shutdown)
    return session


def _join(parameters: ModelParallelParameters) -> Session:
    """Meet the other ranks, and build every group."""
    control, collectives = joining[-1](parameters)
    with contextlib.ExitStack() as undo:  # a job that cannot begin leaves nothing behind: a script may ask for another
        undo.callback(control.close, FAILED)
        # Before anything is computed on a GPU.
        determinism = Determinism(os.environ, tells=control.rank == 0) if parameters.deterministic else None
        if determinism is not None:
            undo.callback(determinism.end)
        rank_record.begin(os.environ, control.rank)
        undo.callback(current_record().leave, FAILED)
        with control.doing("smp.init"), ended_on_error():
            session = Session(parameters, control, collectives)
        undo.pop_all()
    if determinism is not None:
        _repeat(session, determinism)
    return session


def _begin(session: Session, parameters: ModelParallelParameters) -> None:
    """Warn of settings that have no effect here, and run the functions of every job."""
    control = session.ranks.control
    current_record().explain = control.explained
    if (injector := Injector.from_environment(os.environ, session.ranks.rank, session.ranks.groups)) is not None:
        current_record().on_phase = injector.entered
    if session.ranks.rank == 0:
        for sentence in parameters.warnings():
            logger.warning(sentence)
        if not control.has_secret:
            logger.warning(
                "the %d ranks have no secret by which they know each other, since their launcher gave them none: whoever reaches "
                "the ports of their hosts can disturb this job or take a rank's place; keep the network to these hosts, or set %s "
                "to one random text on all of them (docs/security.md)",
                control.size,
                SECRET_VARIABLE,
            )
        if not parameters.ddp and session.ranks.size(Group.DP) > 1:
            logger.warning(
                "%d data parallel ranks, but ddp is false: their gradients are not reduced and each trains its own "
                'copy; set "ddp": True',
                session.ranks.size(Group.DP),
            )
    _note_failure_of(session)
    for begin in at_init:
        begin(session)


def _repeat(session: Session, determinism: Determinism) -> None:
    """Set up the session so that runs of the job are bitwise equal."""
    first = TracedFirstStep()
    session.before_step.append(first.begin)
    session.after_step.append(first.end)
    session.at_leave += [first.end, determinism.end]


class _Said(set[str]):
    """The warnings that a job's user has received."""

    outlives_regrouping = True


def say_once(sentence: str) -> None:
    """Log a warning that holds for the whole job once, on rank 0."""
    if _session is None:
        logger.warning(sentence)
        return
    if _session.ranks.rank != 0:
        return
    said = _session.ranks.keep(_Said, _Said)
    if sentence not in said:
        said.add(sentence)
        logger.warning(sentence)


def _note_failure_of(session: Session) -> None:
    """Let the session know of an exception that ends the process, before exit handlers close it."""
    # The hook must not keep a session that has ended.
    former, weak = sys.excepthook, weakref.ref(session)

    def note(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        if (failed := weak()) is not None:
            failed.has_failed = True
        former(kind, error, traceback)

    def forget() -> None:
        if sys.excepthook is note:  # else another hook stands before it, which goes on calling it
            sys.excepthook = former

    sys.excepthook = note
    session.at_close.append(forget)


def _given(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return settings with the new name of the degree, so that the job's value replaces the script's."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise SMPUserError(
            f"smp.init() got {config!r}, {kind_of(config)}; pass a dictionary of parameters such as "
            '{"ddp": True}, or nothing',
            code="SMP303",
        )
    settings = dict(config)
    if "partitions" in settings and "pipeline_parallel_degree" not in settings:
        settings["pipeline_parallel_degree"] = settings.pop("partitions")
    return settings


def current_session() -> Session:
    """Return the session of this process.

    Raises:
        NotInitializedError: before :func:`init`.
    """
    if _session is None:
        raise NotInitializedError(
            "smp.init() has not been called in this process; call it at the start of the script, before any other smp function"
        )
    return _session


def is_initialized() -> bool:
    """Return whether :func:`init` has been called.

    Example:
        >>> device = smp.state.device if smp.is_initialized() else torch.device("cpu")
    """
    return _session is not None


def is_tracing() -> bool:
    """Return whether this process runs the tracing step, which decides the partition.

    Example:
        >>> if not smp.is_tracing():
        ...     print("a step that counts")
        a step that counts
    """
    return _session is not None and _session.ranks.step.is_tracing


def shutdown() -> None:
    """Leave the job; a later :func:`init` joins again.

    It is called automatically when the process ends.

    Example:
        >>> smp.shutdown()  # between two trainings of one process, such as tests
    """
    global _session
    if _session is not None:
        session, _session = _session, None
        session.close()
