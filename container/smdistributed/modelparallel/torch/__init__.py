"""``import smdistributed.modelparallel.torch as smp``: exactly the names that scripts rely on."""

from smdistributed.modelparallel.torch import amp, comm, exceptions, model, optimizer, optimizers
from smdistributed.modelparallel.torch.checkpoint import load, resume_from_checkpoint, save, save_checkpoint
from smdistributed.modelparallel.torch.comm import (
    DP_GROUP,
    MP_GROUP,
    PP_GROUP,
    RDP_GROUP,
    TP_GROUP,
    WORLD,
    CommGroup,
    RankType,
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    mp_barrier,
    recv_from,
    send,
)
from smdistributed.modelparallel.torch.model import DistributedModel
from smdistributed.modelparallel.torch.optimizer import DistributedOptimizer
from smdistributed.modelparallel.torch.ranks import (
    dp_rank,
    dp_size,
    get_dp_group,
    get_dp_process_group,
    get_mp_group,
    get_mp_process_group,
    get_pp_group,
    get_pp_process_group,
    get_rdp_group,
    get_rdp_process_group,
    get_tp_group,
    get_tp_process_group,
    get_world_process_group,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    size,
    tp_rank,
    tp_size,
)
from smdistributed.modelparallel.torch.state_mod import state
from smp_config.version import __version__
from smp_runtime.creation import delay_param_initialization, model_creation
from smp_runtime.missing import __getattr__  # noqa: F401  # answers for names that are not here yet
from smp_runtime.session import init, is_initialized, shutdown
from smp_runtime.step import step
from smp_runtime.step_output import StepOutput


def is_tracing() -> bool:
    """Whether the current process runs the tracing step."""
    return False


__all__ = [
    "DP_GROUP",
    "MP_GROUP",
    "PP_GROUP",
    "RDP_GROUP",
    "TP_GROUP",
    "WORLD",
    "CommGroup",
    "DistributedModel",
    "DistributedOptimizer",
    "RankType",
    "StepOutput",
    "__version__",
    "allgather",
    "amp",
    "barrier",
    "broadcast",
    "comm",
    "delay_param_initialization",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "exceptions",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_process_group",
    "init",
    "is_initialized",
    "is_tracing",
    "load",
    "local_rank",
    "local_size",
    "model",
    "model_creation",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "optimizer",
    "optimizers",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "send",
    "shutdown",
    "size",
    "state",
    "step",
    "tp_rank",
    "tp_size",
]
