"""The calls of a process group that take tensors of emulated devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten

from smp_emulation.checked import gloo
from smp_emulation.checked.communicators import Communicator
from smp_emulation.checked.streams.futures import StreamFuture
from smp_emulation.errors import CudaCallError

if TYPE_CHECKING:
    from smp_emulation.checked.patches import Patches
    from smp_emulation.checked.streams.device import Devices

_CUDA = torch.device("cuda")
_Parts = list[list[torch.Tensor]]


def install(devices: Devices, patches: Patches) -> None:
    """Let process groups take tensors of the devices, and NCCL be there."""
    Communicator.devices = StreamFuture.devices = devices
    patches.set(torch.futures, "Future", StreamFuture)
    for module in (dist, dist.distributed_c10d):
        patches.set(module, "ProcessGroupNCCL", Communicator)
        patches.set(module, "is_nccl_available", lambda: True)
    gloo.install(patches)
    for name, function in _CALLS.items():
        if hasattr(dist.ProcessGroup, name):
            own = getattr(dist.ProcessGroup, name)
            patches.everywhere(dist.ProcessGroup, name, _routed(devices, name, own, function))


def _routed(devices: Devices, name: str, own: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        numbers = [devices.device_of(tensor) for tensor in tensors]
        if all(number is None for number in numbers):
            return own(group, *args, **kwargs)
        try:
            backend = group._get_backend(_CUDA)
        except RuntimeError:
            backend = None
        if isinstance(backend, gloo.GlooBackend):
            backend = backend.on_devices
        if not isinstance(backend, Communicator):
            raise CudaCallError(
                f"{name} of tensors on an emulated device goes over NCCL, but this group's backend for them is "
                f"{type(backend).__name__}; make the group with the backend cpu:gloo,cuda:nccl"
            )
        return function(backend, *args, **kwargs)

    call.__name__ = name
    return call


# -- one by one --------------------------------------------------------------------------------------------------------


def _first(given: Any) -> torch.Tensor:
    tensor: torch.Tensor = given if isinstance(given, torch.Tensor) else given[0]
    return tensor


def _reduced(parts: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """Reduce several tensors to one, in the order of their ranks."""
    kind: Any = dist.ReduceOp.RedOpType
    dtype = parts[0].dtype
    # In float32: a sum is rounded once, at the end, and not after the part of each rank.
    narrow = dtype in (torch.float16, torch.bfloat16)
    stacked = torch.stack([part.float() if narrow else part for part in parts])
    ways: dict[Any, Callable[[], torch.Tensor]] = {
        kind.SUM: lambda: stacked.sum(0, dtype=stacked.dtype),
        kind.AVG: lambda: stacked.sum(0) / len(parts),
        kind.PRODUCT: lambda: stacked.prod(0),
        kind.MIN: lambda: stacked.amin(0),
        kind.MAX: lambda: stacked.amax(0),
    }
    for known, reduce in ways.items():
        if op == known:
            return reduce().to(dtype)
    raise CudaCallError(f"emulated NCCL does not know the reduction {op}")


def _all_reduce(backend: Communicator, tensors: Any, opts: Any = None, *_: Any) -> Any:
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    op = getattr(opts, "reduceOp", opts if opts is not None else dist.ReduceOp.SUM)
    into = backend.elements(tensors)

    def take(came: _Parts) -> None:
        for position, target in enumerate(into):
            target.copy_(_reduced([parts[position] for parts in came], op))

    return backend.exchange(f"all_reduce ({_named(op)})", tensors, tensors, take, tensors)


def _reduce(backend: Communicator, tensors: Any, opts: Any) -> Any:
    tensors = [_first(tensors)]
    (into,) = backend.elements(tensors)

    def take(came: _Parts) -> None:
        if backend.rank() == opts.rootRank:
            into.copy_(_reduced([parts[0] for parts in came], opts.reduceOp))

    return backend.exchange(f"reduce ({_named(opts.reduceOp)}) to {opts.rootRank}", tensors, tensors, take, tensors)


def _broadcast(backend: Communicator, tensors: Any, opts: Any = None, *_: Any) -> Any:
    root = opts if isinstance(opts, int) else opts.rootRank
    tensors = [_first(tensors)]
    (into,) = backend.elements(tensors)
    return backend.exchange(
        f"broadcast from {root}", tensors, tensors, lambda came: _copy(into, came[root][0]), tensors
    )


def _all_gather(backend: Communicator, outputs: Any, inputs: Any, *_: Any) -> Any:
    if isinstance(inputs, torch.Tensor):
        outputs, inputs = [outputs], [inputs]
    targets = list(outputs[0])
    into = backend.elements(targets)

    def take(came: _Parts) -> None:
        for target, parts in zip(into, came, strict=True):
            _copy(target, parts[0])

    return backend.exchange("all_gather", [inputs[0]], targets, take, outputs)


def _all_gather_single(backend: Communicator, output: torch.Tensor, input: torch.Tensor, *_: Any) -> Any:
    return _all_gather_several(backend, [output], [input])


def _all_gather_several(backend: Communicator, outputs: Any, inputs: Any, *_: Any) -> Any:
    into = backend.elements(outputs)

    def take(came: _Parts) -> None:
        for position, target in enumerate(into):
            _copy(target, torch.cat([parts[position].reshape(-1) for parts in came]))

    return backend.exchange("all_gather_single", list(inputs), list(outputs), take, list(outputs))


def _reduce_scatter_single(backend: Communicator, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
    return _reduce_scatter_several(backend, [output], [input], opts)


def _reduce_scatter_several(backend: Communicator, outputs: Any, inputs: Any, opts: Any = None) -> Any:
    op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    into = backend.elements(outputs)

    def take(came: _Parts) -> None:
        for position, target in enumerate(into):
            whole = _reduced([parts[position].reshape(-1) for parts in came], op)
            _copy(target, whole.view(backend.size(), -1)[backend.rank()])

    return backend.exchange(f"reduce_scatter ({_named(op)})", list(inputs), list(outputs), take, list(outputs))


def _reduce_scatter(backend: Communicator, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Any:
    if isinstance(outputs, torch.Tensor):
        outputs, inputs = [outputs], [inputs]
    op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    (into,) = backend.elements([outputs[0]])
    mine = backend.rank()

    def take(came: _Parts) -> None:
        _copy(into, _reduced([parts[mine] for parts in came], op))

    return backend.exchange(f"reduce_scatter ({_named(op)})", list(inputs[0]), [outputs[0]], take, outputs)


def _all_to_all_single(
    backend: Communicator, output: torch.Tensor, input: torch.Tensor, taken: Any = (), given: Any = (), *_: Any
) -> Any:
    (into,) = backend.elements([output])
    mine, size = backend.rank(), backend.size()
    if taken or given:
        return backend.exchange_parts(output, input, given)

    def take(came: _Parts) -> None:
        _copy(into, torch.cat([parts[0].reshape(size, -1)[mine] for parts in came]))

    return backend.exchange("all_to_all_single", [input], [output], take, [output])


def _all_to_all(backend: Communicator, outputs: Any, inputs: Any, *_: Any) -> Any:
    into = backend.elements(outputs)
    mine = backend.rank()

    def take(came: _Parts) -> None:
        for target, parts in zip(into, came, strict=True):
            _copy(target, parts[mine])

    return backend.exchange("all_to_all", list(inputs), list(outputs), take, list(outputs))


def _send(backend: Communicator, tensors: Any, peer: int, tag: int = 0) -> Any:
    return backend.send(tensors, peer, tag)


def _recv(backend: Communicator, tensors: Any, peer: int, tag: int = 0) -> Any:
    return backend.recv(tensors, peer, tag)


def _refused(backend: Communicator, *_: Any, **__: Any) -> Any:
    raise CudaCallError("NCCL has no such call for tensors of a device")


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source.reshape(target.shape))


def _named(op: Any) -> str:
    return next((name for name, kind in dist.ReduceOp.RedOpType.__members__.items() if op == kind), "unknown reduction")


_CALLS: dict[str, Callable[..., Any]] = {
    "allreduce": _all_reduce,
    "allreduce_coalesced": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "allgather": _all_gather,
    "all_gather_single": _all_gather_single,
    "_allgather_base": _all_gather_single,
    "all_gather_single_coalesced": _all_gather_several,
    "allgather_into_tensor_coalesced": _all_gather_several,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "_reduce_scatter_base": _reduce_scatter_single,
    "reduce_scatter_single_coalesced": _reduce_scatter_several,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_several,
    "all_to_all_single": _all_to_all_single,
    "alltoall_base": _all_to_all_single,
    "alltoall": _all_to_all,
    "send": _send,
    "recv": _recv,
    "recv_anysource": _refused,
    "gather": _refused,
    "scatter": _refused,
    "allgather_coalesced": _refused,
}
