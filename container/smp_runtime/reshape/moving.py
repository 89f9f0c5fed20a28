"""Moving regions of tensors from the ranks that have them to those that want them: each element once, and only there."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from smp_config import Group
from smp_config.machine.collective_backends import traits_of_group
from smp_runtime.checkpoint.files.manifest import EXTRA
from smp_runtime.checkpoint.files.reader import CheckpointReader
from smp_runtime.checkpoint.files.tensor_regions import TensorRegion
from smp_runtime.comm.devices import plain_backend
from smp_runtime.errors import CheckpointError
from smp_runtime.reshape.offers import UNSAVED, Catalogue, Offer
from smp_runtime.reshape.runs import Common, Runs, intersect, runs_of, take_runs, write_runs

if TYPE_CHECKING:
    from smp_runtime.checkpoint.files.manifest import Piece
    from smp_runtime.job.ranks import Ranks

#: A requested tensor region: a state key, a name, and the region.
Want = tuple[str, str, TensorRegion]
#: The same in a message.
_Told = tuple[str, str, tuple[Any, ...]]


class LiveReader(CheckpointReader):
    """Reads tensors of a job that runs: what this rank has, and what :meth:`fetch` has brought from others.

    Attributes:
        received: bytes that came from other ranks.
        needed: bytes of what was asked for that this rank did not have.
    """

    def __init__(self, ranks: Ranks, found: Catalogue, mine: Offer) -> None:
        super().__init__(Path("the state of this job"), found.manifest)
        self._ranks = ranks
        self._found = found
        self._mine = mine
        self._me = str(ranks.rank)
        self._fetched: dict[tuple[str, str, TensorRegion], list[tuple[Common, torch.Tensor]]] = {}
        self._runs: dict[TensorRegion, Runs] = {}
        self._group = _group_for_messages(ranks)
        self.received = 0
        self.needed = 0

    # -- bringing --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fetch(self, wants: Iterable[Want]) -> None:
        """Receive the regions that this rank wants and does not have; every rank calls it, with its own wants."""
        self._fetched.clear()
        everyone = list(range(self._ranks.control.size))
        asked: dict[int, list[Want]] = {}
        shares: dict[int, list[Common]] = {}
        for key, name, region in dict.fromkeys(wants):
            for holder, share in self._sources(key, name, region):
                if holder != self._ranks.rank:
                    asked.setdefault(holder, []).append((key, name, region))
                    shares.setdefault(holder, []).append(share)
        told = {holder: [_told(want) for want in wants] for holder, wants in asked.items()}
        requests = self._ranks.control.allgather(told, everyone)
        works: list[Any] = []
        sent = []
        for rank, wanted in enumerate(requests):
            if rank != self._ranks.rank and wanted.get(self._ranks.rank):
                sent.append(self._packed([_wanted(each) for each in wanted[self._ranks.rank]]))
                works += self._message(dist.isend, sent[-1], rank)
        arriving = {}
        for holder in sorted(asked):
            size = sum(
                share.elements * self.dtype_of(key, name).itemsize
                for (key, name, _), share in zip(asked[holder], shares[holder], strict=True)
            )
            arriving[holder] = torch.empty(size, dtype=torch.uint8, device=self._ranks.device)
            works += self._message(dist.irecv, arriving[holder], holder)
        for work in works:
            work.wait()
        for holder, message in arriving.items():
            self.received += message.numel()
            at = 0
            for (key, name, region), share in zip(asked[holder], shares[holder], strict=True):
                size = share.elements * self.dtype_of(key, name).itemsize
                values = message[at : at + size].clone().view(self.dtype_of(key, name))
                self._fetched.setdefault((key, name, region), []).append((share, values))
                at += size

    def _message(self, call: Any, message: torch.Tensor, rank: int) -> list[Any]:
        return [call(message, rank, group=self._group)] if message.numel() else []

    def _packed(self, wants: Iterable[Want]) -> torch.Tensor:
        """Return the values that another rank wants from this one as bytes, in the order of its wants."""
        parts = [torch.empty(0, dtype=torch.uint8, device=self._ranks.device)]
        for key, name, region in wants:
            piece, tensor = self._mine.tensors[key, name]
            share = intersect(self._runs_of(region), self._runs_of(self._region(name, piece)))
            values = take_runs(tensor, share.there, share.lengths).to(self._ranks.device)
            parts.append(values.contiguous().view(torch.uint8))
        return torch.cat(parts)

    def _sources(self, key: str, name: str, wanted: TensorRegion) -> Iterable[tuple[int, Common]]:
        """Return the ranks that provide a region, each with its part; this rank itself, if it has the part.

        Raises:
            CheckpointError: no rank has some of it.
        """
        holders: dict[Piece, list[int]] = {}
        for rank, piece in self._pieces.get((key, name), ()):
            if not piece.whole_object:
                holders.setdefault(piece, []).append(int(rank))
        runs, covered, found = self._runs_of(wanted), 0, []
        for piece, ranks in holders.items():
            share = intersect(runs, self._runs_of(self._region(name, piece)))
            if not (elements := share.elements):
                continue
            covered += elements
            if self._ranks.rank in ranks:
                holder = self._ranks.rank
            else:  # by turns, so that not all ask the same
                holder = ranks[(self._ranks.rank + zlib.crc32(name.encode())) % len(ranks)]
                self.needed += elements * self.dtype_of(key, name).itemsize
            found.append((holder, share))
        if covered != wanted.elements:
            raise CheckpointError(
                f"the ranks have {covered:,} of the {wanted.elements:,} wanted elements of {key} of {name}; some have gone on "
                "another way than others"
            )
        return found

    def _region(self, name: str, piece: Piece) -> TensorRegion:
        return TensorRegion.of_piece(self._record(name), piece)

    def _runs_of(self, region: TensorRegion) -> Runs:
        if region not in self._runs:
            self._runs[region] = runs_of(region)
        return self._runs[region]

    def forget(self, names: set[str]) -> None:
        """Free tensors of these names, because no rank asks for them any more."""
        self._fetched.clear()
        self._runs.clear()
        self._mine.drop(names)

    # -- reading ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, target: torch.Tensor, wanted: TensorRegion, key: str, name: str) -> None:
        """See :class:`CheckpointReader`; what was fetched."""
        flat = target.view(-1)
        own = self._mine.tensors.get((key, name))
        if own is not None:
            share = intersect(self._runs_of(wanted), self._runs_of(self._region(name, own[0])))
            values = take_runs(own[1], share.there, share.lengths)
            write_runs(flat, share.here, share.lengths, values.to(flat.device, flat.dtype))
        for share, values in self._fetched.get((key, name, wanted), ()):
            write_runs(flat, share.here, share.lengths, values.to(flat.device, flat.dtype))

    def whole(self, key: str, name: str) -> torch.Tensor:
        """See :class:`CheckpointReader`."""
        record = self._record(name)
        made = torch.empty(record.shape, dtype=self.dtype_of(key, name), device=self._ranks.device)
        self.fill(made, TensorRegion.of(record.shape), key, name)
        return made

    def dtype_of(self, key: str, name: str) -> torch.dtype:
        """See :class:`CheckpointReader`."""
        return self._found.dtypes[key, name]

    def state_keys(self) -> dict[str, list[str]]:
        """See :class:`CheckpointReader`."""
        found = {}
        for name, keys in super().state_keys().items():
            saved = [key for key in keys if key != UNSAVED]
            if saved or not keys:
                found[name] = saved
        return found

    def extra(self, name: str) -> Any:
        """See :class:`CheckpointReader`."""
        found = (value for (_, key, title), value in self._found.objects.items() if (key, title) == (EXTRA, name))
        return next(found, None)

    def _state(self, file: str, key: str, name: str) -> Any:
        return self._found.objects[file, key, name]

    def close(self) -> None:
        """Free everything after the last read."""
        self._fetched.clear()
        self._runs.clear()
        self._mine.tensors.clear()


def _told(want: Want) -> _Told:
    key, name, region = want
    return key, name, (region.shape, region.axis, region.cuts, region.first, region.last)


def _wanted(told: _Told) -> Want:
    key, name, region = told
    return key, name, TensorRegion(*region)


def _group_for_messages(ranks: Ranks) -> dist.ProcessGroup:
    """Return a group of all ranks that supports point-to-point messages; all ranks call it."""
    traits = traits_of_group(ranks.backend, ranks.device.type)
    if traits is None or traits.sends_messages:
        return ranks.process_group(Group.WORLD)
    made = dist.new_group(backend=plain_backend(ranks.device))
    if not isinstance(made, dist.ProcessGroup):
        raise AssertionError("this rank is in the group of all ranks")
    return made
