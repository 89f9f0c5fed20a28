"""The one state object of a rank: made by :func:`init`, read through :func:`current`.

Everything below the façade takes what it needs as an argument; only the façade and the classes that a script
touches ask for the current session.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from smp_config import ConfigError, Group, ModelParallelParameters, Topology
from smp_runtime.comm.collectives import Collectives
from smp_runtime.comm.control import ControlPlane, connect, host_name
from smp_runtime.comm.devices import assign_gpus, choose_backend, sharing_warning, use_device, visible_gpus
from smp_runtime.comm.groups import ProcessGroups
from smp_runtime.comm.messages import Messages
from smp_runtime.errors import NotInitializedError, SMPUserError
from smp_runtime.job.module_manager import ModuleManager
from smp_runtime.job.progress import ProgressReporter
from smp_runtime.optim.clipping_watch import watch_clipping
from smp_runtime.parameters.deferred_creation import Deferral
from smp_runtime.pipeline.partition.manual_stages import ManualAssignment
from smp_runtime.smddp.collectives import collectives_of

if TYPE_CHECKING:
    from smp_runtime.model.distributed_model import DistributedModel
    from smp_runtime.optim.distributed_optimizer import DistributedOptimizer

logger = logging.getLogger("smp")


def _show_log() -> None:
    """Print the library's log where a script has not set up logging itself."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[smp] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


#: Where the launcher and the training toolkit leave ``mp_parameters``.
PARAMETERS_VARIABLE = "SM_HP_MP_PARAMETERS"

#: Where they leave the type of the instance that a rank runs on.
INSTANCE_VARIABLE = "SM_CURRENT_INSTANCE_TYPE"


class Session:
    """What a rank knows of its job: configuration, position, groups, device, and the model being trained.

    Args:
        parameters: the typed configuration.
        control: this rank's connection to the others.
        collectives: what the strategies communicate through.

    Attributes:
        cfg: the configuration, also ``smp.state.cfg``.
        topology: all groups.
        device: where this rank computes.
    """

    def __init__(
        self,
        parameters: ModelParallelParameters,
        control: ControlPlane,
        collectives: Collectives | None = None,
    ) -> None:
        self.cfg = parameters
        self.control = control
        self.rank = control.rank
        self.topology: Topology = parameters.topology(control.size)
        self.local_rank, self.local_size, hosts, instance_type, gpus = self._agree(control, parameters)
        self.device = use_device(assign_gpus(gpus)[self.rank])
        #: Of the process groups.
        self.backend = choose_backend(parameters, self.device, hosts, instance_type, gpus)
        if self.rank == 0 and (sentence := sharing_warning(parameters, self.device, gpus)) is not None:
            logger.warning(sentence)
        self.groups = ProcessGroups(control, self.topology, self.backend, parameters.ddp_port, self.device)
        self.collectives: Collectives = collectives or collectives_of(self.backend)
        self.messages = Messages(control, self.topology)
        #: Stages that the script has set by hand.
        self.manual = ManualAssignment(
            parameters.pipeline_parallel_degree, parameters.default_partition or 0, automatic=parameters.auto_partition
        )
        self.progress = ProgressReporter.from_environment(enabled=self.rank == 0, device=self.device)
        # Tasks of a pipeline run on threads of their own, several microbatches at once. Without one a microbatch is the
        # whole rank's: autograd runs the hooks of a GPU's backward pass on a thread of its own.
        self._here: Any = threading.local() if self.size(Group.PP) > 1 else types.SimpleNamespace()
        #: What the backward pass that runs has multiplied its losses with.
        self.seed_scale = 1.0
        #: Whether the step that runs only traces the model, to partition it.
        self.is_tracing = False
        self.step_count = 0
        self.module_manager = ModuleManager()
        #: Whether an exception that nobody caught ends this process.
        self.has_failed = False
        #: Run when the session closes, before anything is released: what must be brought to its end.
        self.at_close: list[Callable[[], None]] = []
        #: Records of models whose parameters are not computed yet.
        self.deferrals: list[Deferral] = []
        # Lists, not sets: every rank must walk over them in the same order.
        self._models: list[weakref.ref[DistributedModel]] = []
        self._optimizers: list[weakref.ref[DistributedOptimizer]] = []

    def size(self, group: Group) -> int:
        """Ranks in this rank's group of that kind."""
        return self.topology.size(group)

    def rank_in(self, group: Group) -> int:
        """This rank's position in its group of that kind."""
        return self.topology.rank_in(group, self.rank)

    def members(self, group: Group) -> list[int]:
        """Global ranks of this rank's group of that kind."""
        return self.topology.group_of(group, self.rank)

    @property
    def microbatch(self) -> int | None:
        """The microbatch that runs, with pipeline parallelism on the calling thread; None outside a step."""
        return getattr(self._here, "microbatch", None)

    @microbatch.setter
    def microbatch(self, value: int | None) -> None:
        self._here.microbatch = value

    @property
    def models(self) -> list[DistributedModel]:
        """The wrapped models that the script still holds, in the order of wrapping."""
        return [model for reference in self._models if (model := reference()) is not None]

    @property
    def model(self) -> DistributedModel | None:
        """The wrapped model, when there is exactly one."""
        models = self.models
        return models[0] if len(models) == 1 else None

    @property
    def optimizer(self) -> DistributedOptimizer | None:
        """The optimizer that was wrapped last, if the script still holds it."""
        optimizers = self.optimizers
        return optimizers[-1] if optimizers else None

    @property
    def optimizers(self) -> list[DistributedOptimizer]:
        """The wrapped optimizers that the script still holds, in the order of wrapping."""
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def adopt_model(self, model: DistributedModel) -> None:
        """Called by a model that was just wrapped."""
        self._models.append(weakref.ref(model))
        for optimizer in self.optimizers:
            optimizer.bind(model)

    def adopt_optimizer(self, optimizer: DistributedOptimizer) -> None:
        """Called by an optimizer that was just wrapped."""
        self._optimizers.append(weakref.ref(optimizer))

    def close(self) -> None:
        """Leave the job: process groups and the control plane are released."""
        failure: Exception | None = None
        for finish in self.at_close:
            try:
                finish()
            except Exception as error:  # the rest is released all the same
                failure = failure or error
        for model in self.models:
            model.leave()
        if self.has_failed:
            self.groups.abandon()
        else:
            self.groups.close()
        self.control.close()
        if failure is not None:
            raise failure

    @staticmethod
    def _agree(
        control: ControlPlane, parameters: ModelParallelParameters
    ) -> tuple[int, int, int, str | None, list[list[str]]]:
        """Check that all ranks read one configuration.

        Returns:
            Local rank, local size, the number of hosts, the type of instance where all hosts are of one, and the GPUs
            that each rank sees.

        The local rank is the position among the ranks whose launcher announced the same host name, so that
        several hosts simulated on one machine count as several. Their ranks see the same GPUs all the same.
        """
        host = host_name()
        settings = json.dumps(parameters.to_mp_parameters(), sort_keys=True)
        mine = (host, settings, os.environ.get(INSTANCE_VARIABLE), visible_gpus())
        everyone = control.allgather(mine, list(range(control.size)))
        for rank, (_, theirs, _, _) in enumerate(everyone):
            if theirs != everyone[0][1]:
                raise ConfigError(
                    f"rank {rank} was configured with {theirs}, but rank 0 with {everyone[0][1]}; every rank must read "
                    f"the same configuration: check what each passes to smp.init() and its {PARAMETERS_VARIABLE}"
                )
        neighbours = [rank for rank, (name, *_) in enumerate(everyone) if name == host]
        hosts = {name for name, *_ in everyone}
        # Of a job with several, no rank may decide by its own: they would not choose the same backend.
        instances = {instance for _, _, instance, _ in everyone}
        return (
            neighbours.index(control.rank),
            len(neighbours),
            len(hosts),
            instances.pop() if len(instances) == 1 else None,
            [gpus for *_, gpus in everyone],
        )


_session: Session | None = None


def init(config: Mapping[str, Any] | None = None) -> Session:
    """Join the job and build every group; the first thing a script does.

    Args:
        config: settings by their documented names. Values that the job itself carries
            (``SM_HP_MP_PARAMETERS``) win over it. Without either, all degrees are 1.

    Raises:
        ConfigError: a setting that cannot work with this number of processes.
    """
    global _session
    if _session is not None:
        return _session
    _show_log()
    carried = os.environ.get(PARAMETERS_VARIABLE)
    settings = {**_given(config), **_given(json.loads(carried) if carried else None)}
    parameters = ModelParallelParameters.from_mp_parameters(settings)
    control = connect()
    session = Session(parameters, control)
    if session.rank == 0:
        for sentence in parameters.warnings():
            logger.warning(sentence)
        if not parameters.ddp and session.size(Group.DP) > 1:
            logger.warning(
                "%d data parallel ranks, but ddp is false: their gradients are not reduced and each trains its own "
                'copy; set "ddp": True',
                session.size(Group.DP),
            )
    watch_clipping(session)
    _session = session
    atexit.register(shutdown)
    _note_failure_of(session)
    return session


def _note_failure_of(session: Session) -> None:
    """Let the session know of an exception that ends the process, before exit handlers close it."""
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
    """Settings under the new name of the degree, so that the job's value replaces the script's."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise SMPUserError(
            f"smp.init() got {config!r}, a {type(config).__name__}; pass a dictionary of parameters such as "
            '{"ddp": True}, or nothing'
        )
    settings = dict(config)
    if "partitions" in settings and "pipeline_parallel_degree" not in settings:
        settings["pipeline_parallel_degree"] = settings.pop("partitions")
    return settings


def current() -> Session:
    """The session of this process.

    Raises:
        NotInitializedError: before :func:`init`.
    """
    if _session is None:
        raise NotInitializedError(
            "smp.init() has not been called in this process; call it at the start of the script, before any other smp function"
        )
    return _session


def is_initialized() -> bool:
    """Whether :func:`init` has been called."""
    return _session is not None


def is_tracing() -> bool:
    """Whether this process runs the tracing step, which decides the partition."""
    return _session is not None and _session.is_tracing


def shutdown() -> None:
    """Leave the job; a later :func:`init` joins again. Called by itself when the process ends."""
    global _session
    if _session is not None:
        session, _session = _session, None
        session.close()
