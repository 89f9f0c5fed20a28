"""``smp.rank()`` and friends: this process's position, asked of the one session."""

from __future__ import annotations

import torch.distributed as dist

from smp_config import Group
from smp_runtime.job.session import current_session


def rank() -> int:
    """Return the global rank of this process.

    Example:
        >>> if smp.rank() == 0:
        ...     print("one line for the whole job")
        one line for the whole job
    """
    return current_session().ranks.rank


def size() -> int:
    """Return the number of ranks over all hosts.

    Example:
        >>> samples_per_rank = 1024 // smp.size()
    """
    return current_session().ranks.size(Group.WORLD)


def local_rank() -> int:
    """Return the rank of this process among the processes of its host.

    Example:
        >>> if smp.local_rank() == 0:  # once on each host
        ...     os.makedirs("cache", exist_ok=True)
    """
    return current_session().ranks.local_rank


def local_size() -> int:
    """Return the number of processes on this host.

    Example:
        >>> threads = max(1, os.cpu_count() // smp.local_size())
    """
    return current_session().ranks.local_size


def tp_rank() -> int:
    """Return this process's rank in its tensor parallel group.

    Example:
        >>> is_first_of_its_layer = smp.tp_rank() == 0
    """
    return current_session().ranks.rank_in(Group.TP)


def tp_size() -> int:
    """Return the number of ranks that share each distributed layer.

    Example:
        >>> hidden_size_here = 4096 // smp.tp_size()
    """
    return current_session().ranks.size(Group.TP)


def pp_rank() -> int:
    """Return this process's rank in its pipeline parallel group: its stage.

    Example:
        >>> reads_data = smp.pp_rank() == 0
    """
    return current_session().ranks.rank_in(Group.PP)


def pp_size() -> int:
    """Return the number of stages of one replica.

    Example:
        >>> is_last_stage = smp.pp_rank() == smp.pp_size() - 1
    """
    return current_session().ranks.size(Group.PP)


def rdp_rank() -> int:
    """Return this process's rank in its reduced data parallel group.

    Example:
        >>> saves = smp.rdp_rank() == 0  # one of the ranks that hold the same
    """
    return current_session().ranks.rank_in(Group.BATCH_RDP)


def rdp_size() -> int:
    """Return the number of ranks with the same pipeline and tensor coordinates.

    Example:
        >>> copies_of_each_parameter = smp.rdp_size()  # without sharded data parallelism
    """
    return current_session().ranks.size(Group.BATCH_RDP)


def mp_rank() -> int:
    """Return this process's rank in its model parallel group.

    Example:
        >>> stands_for_its_replica = smp.mp_rank() == 0
    """
    return current_session().ranks.rank_in(Group.MP)


def mp_size() -> int:
    """Return the number of ranks that hold one replica.

    Example:
        >>> replicas = smp.size() // smp.mp_size()
    """
    return current_session().ranks.size(Group.MP)


def dp_rank() -> int:
    """Return this process's rank in its data parallel group.

    Example:
        >>> sampler = DistributedSampler(dataset, num_replicas=smp.dp_size(), rank=smp.dp_rank())
    """
    return current_session().ranks.rank_in(Group.BATCH_DP)


def dp_size() -> int:
    """Return the number of ranks of one stage.

    Example:
        >>> global_batch_size = 32 * smp.dp_size()
    """
    return current_session().ranks.size(Group.BATCH_DP)


def cp_rank() -> int:
    """Return this process's rank among those that share each sequence out.

    Example:
        >>> writes = smp.cp_rank() == 0 and smp.dp_rank() == 0  # one of the ranks that hold the same
    """
    return current_session().ranks.rank_in(Group.CONTEXT)


def cp_size() -> int:
    """Return the number of ranks that share each sequence out, and read the same batch.

    Example:
        >>> tokens_here = 4096 // smp.cp_size()
    """
    return current_session().ranks.size(Group.CONTEXT)


def get_mp_group() -> list[int]:
    """Return the global ranks of the model parallel group.

    Example:
        >>> smp.get_mp_group()  # the replica that this rank belongs to: in one process, rank 0
        [0]
    """
    return current_session().ranks.members(Group.MP)


def get_dp_group() -> list[int]:
    """Return the global ranks of the data parallel group.

    Example:
        >>> smp.get_dp_group()  # ranks that read different data: in one process, rank 0
        [0]
    """
    return current_session().ranks.members(Group.BATCH_DP)


def get_tp_group() -> list[int]:
    """Return the global ranks of the tensor parallel group.

    Example:
        >>> smp.get_tp_group()  # those with whom this rank shares layers: in one process, rank 0
        [0]
    """
    return current_session().ranks.members(Group.TP)


def get_pp_group() -> list[int]:
    """Return the global ranks of the pipeline parallel group.

    Example:
        >>> smp.get_pp_group()  # the stages of this replica: in one process, rank 0
        [0]
    """
    return current_session().ranks.members(Group.PP)


def get_rdp_group() -> list[int]:
    """Return the global ranks of the reduced data parallel group.

    Example:
        >>> smp.get_rdp_group()  # ranks with the same part of the model: in one process, rank 0
        [0]
    """
    return current_session().ranks.members(Group.BATCH_RDP)


def get_world_process_group() -> dist.ProcessGroup:
    """Return the process group of all ranks, for ``torch.distributed``.

    Example:
        >>> value = torch.ones(1)
        >>> dist.all_reduce(value, group=smp.get_world_process_group())
    """
    return current_session().ranks.groups.group(Group.WORLD)


def get_mp_process_group() -> dist.ProcessGroup:
    """Return the model parallel process group, for ``torch.distributed``.

    Example:
        >>> value = torch.ones(1)
        >>> dist.all_reduce(value, group=smp.get_mp_process_group())
    """
    return current_session().ranks.groups.group(Group.MP)


def get_dp_process_group() -> dist.ProcessGroup:
    """Return the data parallel process group, for ``torch.distributed``.

    Example:
        >>> value = torch.ones(1)
        >>> dist.all_reduce(value, group=smp.get_dp_process_group())
    """
    return current_session().ranks.groups.group(Group.BATCH_DP)


def get_tp_process_group() -> dist.ProcessGroup:
    """Return the tensor parallel process group, for ``torch.distributed``.

    Example:
        >>> value = torch.ones(1)
        >>> dist.all_reduce(value, group=smp.get_tp_process_group())
    """
    return current_session().ranks.groups.group(Group.TP)


def get_pp_process_group() -> dist.ProcessGroup:
    """Return the pipeline parallel process group, for ``torch.distributed``.

    Example:
        >>> value = torch.ones(1)
        >>> dist.all_reduce(value, group=smp.get_pp_process_group())
    """
    return current_session().ranks.groups.group(Group.PP)


def get_rdp_process_group() -> dist.ProcessGroup:
    """Return the reduced data parallel process group, for ``torch.distributed``.

    Example:
        >>> value = torch.ones(1)
        >>> dist.all_reduce(value, group=smp.get_rdp_process_group())
    """
    return current_session().ranks.groups.group(Group.BATCH_RDP)


def get_cp_group() -> list[int]:
    """Return the global ranks of the context parallel group.

    Example:
        >>> smp.get_cp_group()  # those that share each sequence out: in one process, rank 0
        [0]
    """
    return current_session().ranks.members(Group.CONTEXT)


def get_cp_process_group() -> dist.ProcessGroup:
    """Return the context parallel process group, for ``torch.distributed``.

    Example:
        >>> value = torch.ones(1)
        >>> dist.all_reduce(value, group=smp.get_cp_process_group())
    """
    return current_session().ranks.groups.group(Group.CONTEXT)


def cp_process_group() -> dist.ProcessGroup:
    """Return the context parallel process group: another name of :func:`get_cp_process_group`.

    Example:
        >>> smp.cp_process_group() is smp.get_cp_process_group()
        True
    """
    return get_cp_process_group()
