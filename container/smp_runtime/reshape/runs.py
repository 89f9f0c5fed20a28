"""Regions of tensors as runs of elements of the whole: what two regions share, exactly, however each is cut."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from smp_runtime.parameters.registry import intervals

if TYPE_CHECKING:
    from smp_runtime.checkpoint.files.tensor_regions import TensorRegion

#: Kinds of runs in a row that are copied as strided blocks; of more, elements are picked one by one.
_MOST_BLOCKS = 64


class Runs(NamedTuple):
    """Stretches of a flattened tensor, in ascending order; all are int64 on the CPU, ``[runs]``."""

    starts: torch.Tensor  # first element of each in the whole tensor
    lengths: torch.Tensor
    places: torch.Tensor  # first element of each in the flattened region

    @property
    def elements(self) -> int:
        """Return the number of elements of all runs together."""
        return int(self.lengths.sum())


def runs_of(region: TensorRegion) -> Runs:
    """Return the runs of a region."""
    if region.axis is None:
        starts, lengths = torch.tensor([0]), torch.tensor([math.prod(region.shape)])
    else:
        inner = math.prod(region.shape[region.axis + 1 :])
        row = region.shape[region.axis] * inner
        outer = math.prod(region.shape[: region.axis])
        cuts = [(start, stop) for start, stop in intervals(region.cuts) if start < stop]
        firsts = torch.tensor([start * inner for start, _ in cuts], dtype=torch.int64)
        starts = (torch.arange(outer).unsqueeze(1) * row + firsts).reshape(-1)
        lengths = torch.tensor([(stop - start) * inner for start, stop in cuts], dtype=torch.int64).repeat(outer)
    places = lengths.cumsum(0) - lengths
    low, high = places.clamp(min=region.first), (places + lengths).clamp(max=region.last)
    kept = low < high
    return _joined(Runs((starts + low - places)[kept], (high - low)[kept], (low - region.first)[kept]))


def _joined(runs: Runs) -> Runs:
    """Join runs that follow each other without a gap."""
    if len(runs.starts) < 2:
        return runs
    begins = torch.ones(len(runs.starts), dtype=torch.bool)
    begins[1:] = runs.starts[1:] != runs.starts[:-1] + runs.lengths[:-1]
    ends = runs.lengths.cumsum(0)[torch.cat([begins[1:], begins[:1]])]  # a first run always begins
    return Runs(runs.starts[begins], ends.diff(prepend=ends.new_zeros(1)), runs.places[begins])


class Common(NamedTuple):
    """What two regions share: places in each, and lengths, in the order of the whole tensor."""

    here: torch.Tensor
    there: torch.Tensor
    lengths: torch.Tensor

    @property
    def elements(self) -> int:
        """Return the number of shared elements."""
        return int(self.lengths.sum())


def intersect(here: Runs, there: Runs) -> Common:
    """Return the elements that two regions of one tensor share."""
    first = torch.searchsorted(there.starts + there.lengths, here.starts, right=True)
    last = torch.searchsorted(there.starts, here.starts + here.lengths)
    counts = (last - first).clamp(min=0)
    mine = torch.repeat_interleave(torch.arange(len(counts)), counts)
    theirs = first[mine] + torch.arange(len(mine)) - (counts.cumsum(0) - counts)[mine]
    start = torch.maximum(here.starts[mine], there.starts[theirs])
    stop = torch.minimum(here.starts[mine] + here.lengths[mine], there.starts[theirs] + there.lengths[theirs])
    return Common(
        here.places[mine] + start - here.starts[mine], there.places[theirs] + start - there.starts[theirs], stop - start
    )


def take_runs(flat: torch.Tensor, places: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return runs of a flat tensor one after the other; a view if there is only one run."""
    if len(places) == 1:
        return flat.narrow(0, int(places[0]), int(lengths[0]))
    blocks = _blocks(flat, places, lengths)
    if blocks is None:
        return flat[_elements(places, lengths).to(flat.device)]
    if not blocks:
        return flat[:0]
    return torch.cat([block.reshape(-1) for block in blocks])


def write_runs(flat: torch.Tensor, places: torch.Tensor, lengths: torch.Tensor, values: torch.Tensor) -> None:
    """Write values, one after the other, into runs of a flat tensor; types may differ."""
    blocks = _blocks(flat, places, lengths)
    if blocks is None:
        flat[_elements(places, lengths).to(flat.device)] = values.to(flat.device, flat.dtype)
        return
    for block, part in zip(blocks, values.split([block.numel() for block in blocks]), strict=True):
        block.copy_(part.view(block.shape))


def _blocks(flat: torch.Tensor, places: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor] | None:
    """Return views, ``[runs, length]``, of runs of one length at equal distances; None if there are too many of them."""
    count = len(places)
    if count == 0:
        return []
    strides = places.diff()
    # A block ends after a run if the next run has another length, or follows at another distance than this run did.
    ends = lengths.diff() != 0
    ends[1:] |= (strides[1:] != strides[:-1]) & ~ends[:-1]
    bounds = [0, *(torch.nonzero(ends).view(-1) + 1).tolist(), count]
    if len(bounds) > _MOST_BLOCKS:
        return None
    made = []
    for first, stop in itertools.pairwise(bounds):
        stride = int(strides[first]) if stop - first > 1 else 1
        at = flat.storage_offset() + int(places[first])
        made.append(flat.as_strided((stop - first, int(lengths[first])), (stride, 1), at))
    return made


def _elements(places: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the index of every element."""
    begins = lengths.cumsum(0) - lengths
    return torch.repeat_interleave(places - begins, lengths) + torch.arange(int(lengths.sum()))
