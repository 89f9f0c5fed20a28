"""The process group of the backend ``smddp``: NCCL's or gloo's collectives, except for the all-gather."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from smp_config.smddp import BACKEND
from smp_runtime.comm.collectives import TorchCollectives, Work
from smp_runtime.comm.devices import has_gpu
from smp_runtime.smddp.items import GatherItem, resolve_values
from smp_runtime.smddp.layout import HostGrid, agree
from smp_runtime.smddp.messages import MessageGather
from smp_runtime.smddp.streams import StreamGather
from smp_runtime.tensors.torch_private import (
    all_gather_single,
    all_gather_single_coalesced,
    count_collectives,
    give_backends,
    name_group,
    set_timeout,
)

if TYPE_CHECKING:
    from smp_config.smddp import BufferSizes
    from smp_runtime.smddp.work import MessageWork, StreamWork


logger = logging.getLogger("smp")

_BackendType = dist.ProcessGroup.BackendType


class SmddpProcessGroup(dist.ProcessGroup):
    """A group over the plain backends of its devices, with an all-gather in phases between and inside hosts.

    Everything that is not an all-gather goes straight to the plain backend of the tensor's device. An
    all-gather does too if the group's ranks form no grid, or if a buffer is too small for it.

    Args:
        plain: by type of device, the plain backend's type and itself.
        grid: where the group's ranks are, or why the all-gather cannot go in phases.
        gathers: by type of device, the implementation that gathers in phases there.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        plain: dict[str, tuple[Any, Any]],
        grid: HostGrid | str,
        sizes: BufferSizes,
        gathers: dict[str, MessageGather | StreamGather],
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub lacks this constructor
        # Not super(): PyTorch would look for an override of the called method, and find this class's again.
        self._plain = _bare_group(rank, size)
        kinds = [kind for kind, _ in plain.values()]
        for group in (self, self._plain):
            give_backends(group, plain, _BackendType.NCCL if _BackendType.NCCL in kinds else kinds[0])
        self.grid = grid
        self.sizes = sizes
        self._gathers = gathers
        self._said: set[str] = set()
        #: Number of all-gathers in phases and by the plain backend; this rank's input bytes to both.
        self.in_phases = 0
        self.fallen_back = 0
        self.bytes_in_phases = 0
        self.bytes_fallen_back = 0

    @classmethod
    def create(
        cls, store: dist.Store, rank: int, size: int, timeout: timedelta, name: str, nccl_options: Any = None
    ) -> SmddpProcessGroup:
        """Make this rank's end of a group; every rank of the group calls it.

        Args:
            timeout: of every collective.

        Raises:
            ConfigError: the ranks' buffer sizes are wrong or differ.
        """
        host_of, sizes = agree(store, rank, size)
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("cpu/", store), rank, size, timeout=timeout)
        count_collectives(gloo)
        plain: dict[str, tuple[Any, Any]] = {"cpu": (_BackendType.GLOO, gloo)}
        if has_gpu() and dist.is_nccl_available():
            nccl = _nccl(store, rank, size, timeout, name, nccl_options)
            count_collectives(nccl)
            plain["cuda"] = (_BackendType.NCCL, nccl)
        grid = HostGrid.of(host_of, rank)
        gathers: dict[str, MessageGather | StreamGather] = {}
        if isinstance(grid, HostGrid):
            gathers["cpu"] = MessageGather(gloo, grid, sizes)
            if "cuda" in plain:
                across = _nccl_group(store, f"{name}-across-{grid.local}", grid.host, grid.hosts, timeout)
                inside = _nccl_group(store, f"{name}-inside-{grid.host}", grid.local, grid.ranks_per_host, timeout)
                gathers["cuda"] = StreamGather(across, inside, grid, sizes, plain["cuda"][1])
        return cls(rank, size, plain, grid, sizes, gathers)

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch calls it
        """Return the name that PyTorch shows for the group."""
        return BACKEND

    def fallback_reason(self, shard_bytes: int, device: str = "cpu") -> str | None:
        """Return why the plain backend does an all-gather; None if it goes in phases.

        Args:
            shard_bytes: the bytes that one rank contributes.
        """
        if isinstance(self.grid, str):
            return self.grid
        if device not in self._gathers:
            return f"there is no all-gather in phases on {device}"
        if shard_bytes == 0:
            return "it is empty"
        return self.sizes.fallback_reason(shard_bytes, self.grid.size, self.grid.hosts * shard_bytes)

    # -- the all-gather, under all its names -------------------------------------------------------------------------

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """Gather the inputs of all ranks, in rank order, into ``output``, ``[size * input.numel()]`` elements."""
        input = resolve_values(input)
        works = self._phases([GatherItem.into_one(output, input, self.size())], opts)
        return works or all_gather_single(self._plain, output, input, *_given(opts))

    def all_gather_single_coalesced(
        self, output_lists: list[torch.Tensor], input_list: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """Run several :meth:`all_gather_single` at once."""
        input_list = [resolve_values(shard) for shard in input_list]
        pairs = zip(output_lists, input_list, strict=True)
        works = self._phases([GatherItem.into_one(output, shard, self.size()) for output, shard in pairs], opts)
        return works or all_gather_single_coalesced(self._plain, output_lists, input_list, *_given(opts))

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        """Gather a tensor from each rank: ``output_tensors[0][rank]`` takes ``input_tensors[0]`` of that rank."""
        if isinstance(input_tensors, torch.Tensor):
            # The short form: its third argument is a timeout.
            output_tensors, input_tensors, opts = [output_tensors], [input_tensors], None
        input_tensors, item = [resolve_values(shard) for shard in input_tensors], None
        if len(input_tensors) == 1:
            outputs, shard = output_tensors[0], input_tensors[0]
            item = GatherItem.into_list(outputs, shard, self.size(), through_one=shard.device.type == "cuda")
        return self._phases([item], opts) or self._plain.allgather(output_tensors, input_tensors, *_given(opts))

    # Names of before PyTorch 2.13.
    _allgather_base: Any = all_gather_single
    allgather_into_tensor_coalesced: Any = all_gather_single_coalesced

    def _phases(self, items: Sequence[GatherItem | None], opts: Any) -> MessageWork | StreamWork | None:
        """Begin all-gathers in phases; return None if the plain backend has to do them."""
        wanted = [item for item in items if item is not None]
        if len(wanted) < len(items) or not items:
            return None  # tensors do not fit each other: the plain backend raises the error
        device = wanted[0].shard.device.type
        for item in wanted:
            if not self.tries_phases(item.shard.numel(), device):
                return None
        is_asynchronous = getattr(opts, "asyncOp", True)
        return self._start(wanted, here=not is_asynchronous)

    def _start(self, items: Sequence[GatherItem], *, here: bool = False) -> MessageWork | StreamWork:
        self.in_phases += len(items)
        self.bytes_in_phases += sum(item.shard.numel() for item in items)
        return self._gathers[items[0].shard.device.type].start(items, here=here)

    def gather_in_pieces(self, full: torch.Tensor, shard: torch.Tensor) -> MessageWork | StreamWork | None:
        """Begin an all-gather in phases; return None if the plain backend has to do it.

        A shard that is too large for the buffers is gathered in pieces. Both tensors are contiguous. Scripts do not
        call this: their all-gathers fall back as documented.
        """
        device = full.device.type
        if isinstance(self.grid, HostGrid) and device in self._gathers and shard.nbytes:
            step = self.sizes.piece_bytes(shard.nbytes, self.grid.hosts, self.grid.ranks_per_host)
            if step:
                return self._start(GatherItem.into_pieces(full, shard, self.size(), step))
            reason = self.sizes.pieces_reason(shard.nbytes, self.grid.hosts, self.grid.ranks_per_host)
            self._fall_back(reason or "", shard.nbytes, "pieces")
            return None
        self.tries_phases(shard.nbytes, device)  # counts the fallback, and logs the reason
        return None

    def tries_phases(self, shard_bytes: int, device: str = "cpu") -> bool:
        """Return whether an all-gather that is to begin goes in phases; if it falls back, count and log that."""
        reason = self.fallback_reason(shard_bytes, device)
        if reason is None:
            return True
        if isinstance(self.grid, str):
            kind = "place"
        elif shard_bytes > self.sizes.scratch:
            kind = "scratch"
        else:
            kind = "sort"
        self._fall_back(reason, shard_bytes, kind)
        return False

    def _fall_back(self, reason: str, shard_bytes: int, kind: str) -> None:
        """Count an all-gather of the plain backend, and log the reason.

        It is logged once for the ranks' places, once for each buffer and once for pieces.
        """
        self.fallen_back += 1
        self.bytes_fallen_back += shard_bytes
        if shard_bytes and self.rank() == 0 and kind not in self._said:
            self._said.add(kind)
            logger.log(
                logging.INFO if kind == "place" else logging.WARNING,
                "SMDDP: all-gathers over %d ranks fall back to the plain backend: %s",
                self.size(),
                reason,
            )

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of all later collectives, including those that an all-gather is made of."""
        self._plain.set_timeout(timeout)
        for gather in self._gathers.values():
            if isinstance(gather, StreamGather):
                gather.set_timeout(timeout)

    def abort(self) -> None:
        """End the collectives under way, including those that an all-gather is made of."""
        for gather in self._gathers.values():
            gather.abort()
        self._plain.abort()

    def shutdown(self) -> None:
        """Release connections and threads."""
        for gather in self._gathers.values():
            gather.close()
        super().shutdown()


def _forward(name: str) -> Callable[..., Any]:
    def forward(self: SmddpProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._plain, name)(*args, **kwargs)

    forward.__name__ = name
    return forward


# Inherited as they are, these would run with Python's lock held, in PyTorch's code that looks for overrides; a thread
# of gloo that lets go of a tensor needs it too, and holds a lock that they need.
for _name in (
    *("allreduce", "allreduce_coalesced", "broadcast", "barrier", "send", "recv", "recv_anysource", "reduce", "gather"),
    *("scatter", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter_tensor_coalesced", "all_to_all_single", "alltoall_base", "alltoall", "allgather_coalesced"),
):
    if hasattr(dist.ProcessGroup, _name):
        setattr(SmddpProcessGroup, _name, _forward(_name))


def _given(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)


def _bare_group(rank: int, size: int) -> dist.ProcessGroup:
    """Return a group of PyTorch's own class, without backends."""
    return dist.ProcessGroup(rank, size)  # type: ignore[call-arg]  # the stub lacks this constructor


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta, name: str, options: Any = None) -> Any:
    """Return NCCL over a group; communicators are made at the first use."""
    options = options if isinstance(options, dist.ProcessGroupNCCL.Options) else dist.ProcessGroupNCCL.Options()
    set_timeout(options, timeout)
    options.group_name = name
    return dist.ProcessGroupNCCL(dist.PrefixStore(f"cuda/{name}/", store), rank, size, options)


def _nccl_group(store: dist.Store, name: str, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return some ranks of a group as a group that uses only NCCL."""
    backend = _nccl(store, rank, size, timeout, name)
    count_collectives(backend)
    group = _bare_group(rank, size)
    give_backends(group, {"cuda": (_BackendType.NCCL, backend)}, _BackendType.NCCL)
    name_group(group, name)
    return group


class SmddpCollectives(TorchCollectives):
    """The collectives for the strategies in a job with the backend ``smddp``."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """Gather in phases if that is possible and useful, else with the plain backend."""
        work = group.gather_in_pieces(full, shard) if isinstance(group, SmddpProcessGroup) else None
        return work or super().all_gather(full, shard, group)
