"""Transports of full gradient buckets. The reducer decides when a bucket is sent, its transport decides how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smp_runtime.comm.buckets import Bucket, Reducing, Travel

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from smp_runtime.comm.collectives import Collectives


#: Takes a result by the bucket's position, and which parameters any rank used.
Deliver = Callable[[int, "torch.Tensor", Sequence[bool]], None]


class AllReduceTransport:
    """Every rank gets the average of every gradient."""

    carries_tail = True
    divides = True
    lands_in_gradients = True

    def __init__(self, collectives: Collectives, group: dist.ProcessGroup) -> None:
        self._collectives = collectives
        self._group = group

    def launch(self, bucket: Bucket, buffer: torch.Tensor, position: int, is_last: bool) -> Travel:
        """Start to sum the bucket over the group."""
        return Reducing(self._collectives.all_reduce(buffer, self._group), buffer)

    def deliver(self, position: int, result: torch.Tensor, used: Sequence[bool]) -> None:
        """Raise AssertionError: this is never called, because ``lands_in_gradients`` is True."""
        raise AssertionError("the result lands in the gradients")


@dataclass(frozen=True)
class Peers:
    """The ranks that average gradients by a hook.

    Attributes:
        group: the ranks that hold replicas of the parameters.
        collectives: how they exchange tensors.
    """

    group: dist.ProcessGroup
    collectives: Collectives


class HookBucket:
    """The argument of a communication hook, with the methods of ``torch.distributed.GradBucket``.

    A ``GradBucket`` itself cannot be made here.

    Attributes:
        process_group: the ranks that average their gradients.
        collectives: how they exchange tensors.
    """

    def __init__(
        self,
        bucket: Bucket,
        buffer: torch.Tensor,
        position: int,
        is_last: bool,
        parameters: Sequence[torch.Tensor],
        peers: Peers,
    ) -> None:
        self.process_group = peers.group
        self.collectives = peers.collectives
        self._bucket = bucket
        self._buffer = buffer
        self._position = position
        self._is_last = is_last
        self._parameters = parameters

    def index(self) -> int:
        """Return the position in the order of launching."""
        return self._position

    def buffer(self) -> torch.Tensor:
        """Return the gradients as a flat tensor, not averaged."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the flat tensor."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients, shaped like their parameters; views of the flat tensor."""
        return self._bucket.views(self._buffer, self._parameters)

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of this bucket."""
        return [self._parameters[index] for index in self._bucket.indices]

    def is_last(self) -> bool:
        """Return whether no other bucket follows in this window."""
        return self._is_last


class _FromHook:
    def __init__(self, future: torch.futures.Future[Any]) -> None:
        self._future = future

    def finish(self) -> torch.Tensor:
        value = self._future.wait()
        average: torch.Tensor = value[0] if isinstance(value, list | tuple) else value
        return average


class HookTransport:
    """Transport by a hook in the form of PyTorch's DDP communication hooks, which averages the buckets.

    Args:
        deliver: takes the averages if they are not the gradients of whole parameters, as with sharded optimizer state.
    """

    carries_tail = False
    divides = False

    def __init__(
        self,
        state: Any,
        hook: Callable[[Any, Any], torch.futures.Future[Any]],
        parameters: Sequence[torch.Tensor],
        peers: Peers,
        deliver: Deliver | None = None,
    ) -> None:
        self._state = state
        self._hook = hook
        self._parameters = parameters
        self._peers = peers
        self._deliver = deliver
        self.lands_in_gradients = deliver is None
        self._previous: torch.futures.Future[Any] | None = None

    def launch(self, bucket: Bucket, buffer: torch.Tensor, position: int, is_last: bool) -> Travel:
        """Give the bucket to the hook."""
        if self._previous is not None and buffer.device.type == "cpu":
            # Hooks that communicate again when a first exchange is done (PowerSGD) wait inside gloo's two threads;
            # with two buckets under way both would wait for each other for ever.
            self._previous.wait()
        filled = bucket.offsets[-1] + self._parameters[bucket.indices[-1]].numel()
        buffer[filled:].zero_()  # so that all shards are of one length
        future = self._hook(self._state, HookBucket(bucket, buffer, position, is_last, self._parameters, self._peers))
        self._previous = None if is_last else future
        return _FromHook(future)

    def deliver(self, position: int, result: torch.Tensor, used: Sequence[bool]) -> None:
        """Pass on the averages of the hook."""
        if self._deliver is None:
            raise AssertionError("the result lands in the gradients")
        self._deliver(position, result, used)
