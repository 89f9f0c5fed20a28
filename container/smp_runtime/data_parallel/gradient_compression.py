"""Communication hooks that send gradients in fewer bytes, for ``register_comm_hook`` and for PyTorch's DDP.

What a rank could not send it adds to its next gradient (error feedback), so nothing is lost, only late.

Annotations are evaluated here, since PyTorch's DDP compares those of a hook with its own types.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from smp_runtime.comm.collectives import Collectives, TorchCollectives
from smp_runtime.errors import SMPUserError

#: Elements that share a scale: 1 + 4/256 bytes per element.
_BLOCK = 256
_INT8_MAX = 127


class _Remembered:
    """A float32 value per element of the gradients, kept from one reduction to the next; zero at first.

    Buckets are divided otherwise after the first reductions, so values are found by parameter then.
    """

    def __init__(self) -> None:
        self._flat: dict[torch.Tensor, tuple[list[int], torch.Tensor]] = {}  # by the bucket's first parameter
        self._by_parameter: dict[torch.Tensor, torch.Tensor] = {}

    def of(self, bucket: dist.GradBucket) -> torch.Tensor:
        """Return the kept values of a bucket, flat like its buffer; later writes to the result are kept, too."""
        parameters = bucket.parameters()
        ids = [id(parameter) for parameter in parameters]
        known, flat = self._flat.get(parameters[0], (None, None))
        if known == ids and flat is not None:
            return flat
        self._flat = {first: kept for first, kept in self._flat.items() if not set(kept[0]) & set(ids)}
        buffer = bucket.buffer()
        flat = torch.zeros_like(buffer, dtype=torch.float32)
        for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
            start = gradient.storage_offset() - buffer.storage_offset()
            values = flat[start : start + gradient.numel()]
            if parameter in self._by_parameter:
                values.copy_(self._by_parameter[parameter])
            self._by_parameter[parameter] = values
        self._flat[parameters[0]] = ids, flat
        return flat


class _CompressionState:
    """Over which ranks a hook averages; without a group over those that the bucket names, under PyTorch's DDP over all."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group

    def peers(self, bucket: dist.GradBucket) -> tuple[dist.ProcessGroup, Collectives]:
        """Return the process group of the ranks, and the collectives that they use."""
        group = self.process_group or getattr(bucket, "process_group", None) or dist.group.WORLD
        if group is None:
            raise SMPUserError(
                "a communication hook averages over ranks, but no process group was made; call smp.init() first",
                code="SMP303",
            )
        collectives = getattr(bucket, "collectives", None)
        return group, collectives or TorchCollectives()


class Int8State(_CompressionState):
    """The state of :func:`int8_hook`: rounding errors, 4 bytes per parameter and another 4/n.

    Args:
        process_group: of the ranks that hold replicas of the parameters; default: these ranks.
        error_feedback: add the rounding errors to the next gradient; False discards them and saves the memory.

    Example:
        >>> state = smp.comm_hooks.Int8State(error_feedback=False)
        >>> if smp.dp_size() > 1:  # alone there is nothing to average
        ...     model.register_comm_hook(state, smp.comm_hooks.int8_hook)
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, error_feedback: bool = True) -> None:
        super().__init__(process_group)
        self.error_feedback = error_feedback
        self.left_over = _Remembered()
        self._left_of_sums: dict[torch.Tensor, torch.Tensor] = {}  # by the bucket's first parameter

    def left_of_sum(self, bucket: dist.GradBucket, average: torch.Tensor) -> torch.Tensor:
        """Return the rounding error of the part that this rank sums; zeros if the parts have changed."""
        left = self._left_of_sums.get(bucket.parameters()[0])
        if left is None or left.shape != average.shape:
            left = self._left_of_sums[bucket.parameters()[0]] = torch.zeros_like(average)
        return left


def int8_hook(state: Int8State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in 8 bits per element and a float32 scale per 256: about a quarter of float32's bytes.

    Each rank adds up one part of the bucket in float32, of what all ranks sent, and sends the rounded average to all, so
    all have the same. Values that are not finite arrive as NaN everywhere.

    Args:
        state: what is kept from one gradient to the next; one for a model.
        bucket: what PyTorch's DDP, or a model of this library, hands to a hook: gradients of several parameters.

    Returns:
        The average, of the shape and type of ``bucket.buffer()``.

    Example:
        >>> if smp.dp_size() > 1:  # alone there is nothing to average
        ...     model.register_comm_hook(smp.comm_hooks.Int8State(), smp.comm_hooks.int8_hook)
    """
    buffer, (group, collectives) = bucket.buffer(), state.peers(bucket)
    if not buffer.numel():
        return _done(buffer)
    ranks = group.size()
    wanted = buffer.float()
    if state.error_feedback:
        left_over = state.left_over.of(bucket)
        wanted = wanted + left_over
    # Each rank's part is a whole number of blocks.
    part = math.ceil(buffer.numel() / (ranks * _BLOCK)) * _BLOCK
    padded = wanted.new_zeros(ranks * part)
    padded[: wanted.numel()] = wanted
    codes, scales = _quantized(padded)
    if state.error_feedback:
        left_over.copy_(_finite(wanted - _restored(codes, scales)[: wanted.numel()]))
    their_codes, their_scales = torch.empty_like(codes), torch.empty_like(scales)
    for work in [
        collectives.all_to_all(their_codes, codes, group),
        collectives.all_to_all(their_scales, scales, group),
    ]:
        work.wait()
    average = _restored(their_codes, their_scales).view(ranks, part).mean(0)
    if state.error_feedback:
        left = state.left_of_sum(bucket, average)
        average += left
    mine, my_scales = _quantized(average)
    if state.error_feedback:
        left.copy_(_finite(average - _restored(mine, my_scales)))
    for whole, shard in ((codes, mine), (scales, my_scales)):
        collectives.all_gather(whole, shard, group).wait()
    return _done(_restored(codes, scales)[: buffer.numel()].to(buffer.dtype))


class SparseState(_CompressionState):
    """The state of :func:`sparse_hook`: values that were not sent yet, and the momentum, 4 bytes per parameter each.

    Args:
        process_group: of the ranks that hold replicas of the parameters; default: these ranks.
        density: the share of the gradient's elements that is sent: those with the greatest absolute value.
        momentum: is computed from this rank's own gradients, before elements are chosen (momentum correction);
            then the optimizer should have none. 0 leaves it to the optimizer.
        warm_up: the densities of the first reductions, one each, as (0.25, 0.0625, 0.015625, 0.004).

    Raises:
        SMPUserError: a density is not above 0 and at most 1, or the momentum not from 0 to below 1.

    Example:
        >>> state = smp.comm_hooks.SparseState(density=0.01, warm_up=(0.25, 0.06))
        >>> if smp.dp_size() > 1:  # alone there is nothing to average
        ...     model.register_comm_hook(state, smp.comm_hooks.sparse_hook)
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        density: float = 0.01,
        momentum: float = 0.0,
        warm_up: Sequence[float] = (),
    ) -> None:
        super().__init__(process_group)
        for value in (density, *warm_up):
            if not 0 < value <= 1:
                raise SMPUserError(
                    f"a density of {value} was given; it is the share of elements that are sent: use for example 0.01",
                    code="SMP303",
                )
        if not 0 <= momentum < 1:
            raise SMPUserError(
                f"momentum is {momentum}; it is the share of the former gradients that is kept: use for example 0.9",
                code="SMP303",
            )
        self._density = density
        self.momentum = momentum
        self._warm_up = list(warm_up)
        self._reductions: dict[torch.Tensor, int] = {}
        self.unsent = _Remembered()
        self.velocity = _Remembered()

    def next_density(self, bucket: dist.GradBucket) -> float:
        """Count a reduction of a bucket, and return its density."""
        parameters = bucket.parameters()
        done = self._reductions.get(parameters[0], 0)
        self._reductions.update(dict.fromkeys(parameters, done + 1))
        return self._warm_up[done] if done < len(self._warm_up) else self._density


def sparse_hook(state: SparseState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the greatest elements of a bucket only (Lin et al., "Deep Gradient Compression"); others wait and add up.

    Each rank chooses for itself, and sends values with their places: 8 bytes per element that is sent, to every other rank.

    Args:
        state: as for :func:`int8_hook`.
        bucket: likewise.

    Returns:
        The average, of the shape and type of ``bucket.buffer()``.

    Example:
        >>> if smp.dp_size() > 1:  # alone there is nothing to average
        ...     model.register_comm_hook(smp.comm_hooks.SparseState(density=0.01), smp.comm_hooks.sparse_hook)
    """
    buffer, (group, collectives) = bucket.buffer(), state.peers(bucket)
    if not buffer.numel():
        return _done(buffer)
    unsent = state.unsent.of(bucket)
    gradient = buffer.float()
    if state.momentum:
        velocity = state.velocity.of(bucket)
        gradient = velocity.mul_(state.momentum).add_(gradient)
    unsent += gradient
    count = max(1, math.ceil(state.next_density(bucket) * buffer.numel()))
    # Non-finite values count as greatest, so that they are sent and all ranks see an overflow.
    places = unsent.abs().nan_to_num_(nan=math.inf).topk(count, sorted=False).indices
    values = unsent[places]
    unsent[places] = 0.0
    unsent.copy_(_finite(unsent))
    if state.momentum:
        velocity[places] = 0.0  # or it would push elements further that were just sent
        velocity.copy_(_finite(velocity))
    all_places = places.new_empty(group.size() * count, dtype=torch.int32)
    all_values = values.new_empty(group.size() * count)
    works = [
        collectives.all_gather(all_places, places.to(torch.int32), group),
        collectives.all_gather(all_values, values, group),
    ]
    for work in works:
        work.wait()
    average = torch.zeros_like(unsent)
    # One rank after the other: its places differ, so every rank adds in the same order and gets the same sums.
    for their_places, their_values in zip(all_places.split(count), all_values.split(count), strict=True):
        average[their_places.long()] += their_values / group.size()
    return _done(average.to(buffer.dtype))


def _quantized(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers from -127 to 127, and the scale of each block; both flat."""
    blocks = values.view(-1, _BLOCK)
    scales = blocks.abs().amax(1) / _INT8_MAX
    steps = torch.where(scales > 0, scales, torch.ones_like(scales))
    codes = (blocks / steps[:, None]).nan_to_num_(nan=1.0).clamp_(-_INT8_MAX, _INT8_MAX).round_().to(torch.int8)
    # An infinite scale would make zeros of the block that are NaN, and others infinite; let all be NaN.
    return codes.view(-1), torch.where(scales.isfinite(), scales, torch.full_like(scales, math.nan))


def _restored(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (codes.view(-1, _BLOCK).float() * scales[:, None]).view(-1)


def _finite(values: torch.Tensor) -> torch.Tensor:
    """Replace NaN and infinity by 0; after an overflow they would come back in every later gradient."""
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _done(result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(result)
    return future
