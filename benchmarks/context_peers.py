"""PyTorch's ``context_parallel`` on CPUs, and what Accelerate does around it.

PyTorch's prototype knows the attention operators of GPUs. On a CPU its ring and its balance are the same code with the CPU's
flash operator, which this module adds to its table. As its handlers on GPUs do, the added ones refuse a bias.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as prototype

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

#: The sequence's dim of queries, keys and values; PyTorch's code fixes it too.
_SEQUENCE = 2

#: By the name of a method here, PyTorch's.
METHODS = {"all_gather": "allgather", "ring": "alltoall"}


def install(method: str) -> None:
    """Let the prototype run on CPUs, and choose its method."""
    prototype.custom_ops[_FORWARD.default] = _attend
    prototype.custom_ops[_BACKWARD.default] = _differentiate
    prototype.set_rotate_method(METHODS[method])


def _attend(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the prototype's ring with the CPU's operator."""
    query, key, value, dropout, is_causal = (*args, *(0.0, False)[len(args) - 3 :])
    options = _options(kwargs, dropout)
    local = {"query": _local(query), "key": _local(key), "value": _local(value)}
    group = query.device_mesh.get_group()
    found = prototype._templated_ring_attention(group, _SEQUENCE, _FORWARD, **local, is_causal=is_causal, **options)
    return tuple(_wrap(each, query) for each in found)


def _differentiate(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the prototype's ring backward with the CPU's operator."""
    query = args[1]
    above, *inputs = map(_local, args[:6])
    names = ("query", "key", "value", "out", "logsumexp")
    found = prototype._templated_ring_attention_backward(
        query.device_mesh.get_group(),
        _SEQUENCE,
        _BACKWARD,
        grad_out=above,
        grad_out_name="grad_out",
        **dict(zip(names, inputs, strict=True)),
        is_causal=args[7],
        **_options(kwargs, args[6]),
    )
    return tuple(_wrap(each, query) for each in found)


def _options(kwargs: dict[str, Any], dropout: float) -> dict[str, Any]:
    if kwargs.get("attn_mask") is not None:
        raise NotImplementedError("attn_bias is not supported yet")
    return {"dropout_p": dropout, "scale": kwargs.get("scale")}


def _local(value: Any) -> torch.Tensor:
    return value._local_tensor if isinstance(value, DTensor) else value


def _wrap(value: torch.Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(value, like.device_mesh, [Shard(_SEQUENCE)], run_check=False)


@contextlib.contextmanager
def cut(mesh: DeviceMesh, *buffers: torch.Tensor, dims: tuple[int, ...] | None = None) -> Iterator[None]:
    """Cut buffers in place, and let attention in the block be over all ranks; the buffers stay cut."""
    with context_parallel(
        mesh, buffers=list(buffers), buffer_seq_dims=list(dims or [1] * len(buffers)), no_restore_buffers=set(buffers)
    ):
        yield


def as_accelerate(model: nn.Module) -> nn.Module:
    """Prepare a model as ``Accelerator.prepare`` does with ``cp_size``: each layer's mask is dropped for causal attention.

    ``Accelerator`` itself refuses ``cp_size`` on CPUs.
    """
    from accelerate.big_modeling import _attach_context_parallel_hooks

    _attach_context_parallel_hooks(model)
    return model


class PeerBytes:
    """Adds up the bytes of keys, values and their gradients that PyTorch's rings send to other ranks.

    Attributes:
        sent: bytes of this rank.
    """

    def __init__(self) -> None:
        self.sent = 0
        self._count(prototype._AllToAllRotater, lambda rotater, size: 1)
        self._count(
            prototype._AllGatherRotater, lambda rotater, size: 0 if rotater._aggregated_buffer is not None else size - 1
        )

    def _count(self, kind: Any, copies: Callable[[Any, int], int]) -> None:
        exchange = kind.exchange_buffers

        def counted(rotater: Any, buffer: torch.Tensor) -> None:
            self.sent += buffer.nbytes * copies(rotater, dist.get_world_size(rotater._pg))
            exchange(rotater, buffer)

        kind.exchange_buffers = counted
