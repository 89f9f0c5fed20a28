"""Filling a model that was laid out anew with what the ranks had before, batch by batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from smp_runtime.checkpoint.files.manifest import MASTER, MODULE, FoundCheckpoint
from smp_runtime.checkpoint.files.tensor_regions import TensorRegion
from smp_runtime.checkpoint.live_state import (
    Holding,
    live_buffers,
    live_extras,
    live_masters,
    live_weights,
    saved_records,
    updated_parameters,
)
from smp_runtime.checkpoint.load_partial import PartialLoad, always_key
from smp_runtime.parameters.optimizer_shards import store_all
from smp_runtime.reshape.offers import UNSAVED
from smp_runtime.tensors.nested import copy_tensors

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.job.session import Session
    from smp_runtime.model.distributed_model import DistributedModel
    from smp_runtime.optim.distributed_optimizer import DistributedOptimizer
    from smp_runtime.reshape.moving import LiveReader, Want

#: Bytes of whole tensors, with their optimizer state, that move at once; each rank holds at most as much besides its state.
BATCH_BYTES = 64 * 2**20


class LiveLoading(PartialLoad):
    """The state of a running job on its way to where other degrees want it; made and called by all ranks alike."""

    def __init__(
        self,
        session: Session,
        model: DistributedModel,
        optimizer: DistributedOptimizer | None,
        reader: LiveReader,
    ) -> None:
        found = FoundCheckpoint("the state of this job", Path("the state of this job"), reader.manifest)
        super().__init__(session, found, model, optimizer, strict=True, states=True, reader=reader)
        self._live = reader

    def groups(self, count: int) -> list[list[nn.Parameter]]:
        """Return the model's parameters by optimizer group: each is in the group of its source parameters."""
        made: list[list[nn.Parameter]] = [[] for _ in range(count)]
        saved = self.manifest.optimizer
        owner: dict[str, int] = {}
        saved_groups = [] if saved is None else saved.groups
        for index, group in enumerate(saved_groups):
            owner.update(dict.fromkeys(group["params"], index))
        for record in self._model.registry:
            owners = [owner[source] for source in self._sources(record.name) if source in owner]
            if owners:
                made[owners[0]].append(record.parameter)
        return made

    @torch.no_grad()
    def load_tensors(self) -> None:
        """Move and fill everything; every rank calls it."""
        if self._model.shards is not None:
            self._model.shards.release()
        batches = list(self._batches())
        for number, names in enumerate(batches):
            self._live.fetch(self._wants(names))
            self.load_named(names)
            # Several parameters may come from one source, such as a packed weight.
            later = itertools.chain.from_iterable(batches[number + 1 :])
            self._live.forget(self._sources_of(names) - self._sources_of(later))
        self._store_masters()
        for name, module in live_extras(self._model):
            value = self.reader.extra(name)
            if value is not None:
                module.set_extra_state(copy_tensors(value))
        self.reader.close()

    def load_named(self, only: Container[str] | None) -> None:
        """See :class:`PartialLoad`; and buffers that are in no state."""
        super().load_named(only)
        for name, buffer in self._unsaved():
            if only is None or name in only:
                values = torch.empty_like(buffer, memory_format=torch.contiguous_format)
                self._live.fill(values, TensorRegion.of(tuple(buffer.shape)), UNSAVED, name)
                buffer.copy_(values)

    def _in_no_state(self) -> Container[str]:
        return {name for name in self.manifest.buffers if not self.reader.holds(MODULE, name)}

    def _state_type(self, saved: torch.dtype, updated: torch.dtype) -> torch.dtype:
        """Return the saved type: the optimizer may keep float32 states of bfloat16 weights."""
        return saved

    def _batches(self) -> Iterator[set[str]]:
        """Yield names of parameters and buffers in batches, the same on all ranks."""
        names: set[str] = set()
        waiting = 0
        sizes = {**self.manifest.parameters, **self.manifest.buffers}
        keys = self.reader.state_keys()
        ours = [record.name for record in saved_records(self._model)]
        for name in dict.fromkeys([*ours, *(name for name in self._of if name not in ours), *self.manifest.buffers]):
            names.add(name)
            for source in self._sources(name) or (name,):
                if source in sizes:
                    waiting += sizes[source].elements * 4 * (2 + len(keys.get(source, ())))
            if waiting >= BATCH_BYTES:
                yield names
                names, waiting = set(), 0
        yield names

    def _holdings(self) -> Iterator[tuple[Holding, Callable[[str], str]]]:
        """Yield this rank's tensors with a function from name to state key.

        Weights are read from weights and masters from masters. Weights that have masters on this rank are left out,
        because they are copied from these.
        """
        own = list(live_masters(self._model))
        covered = {(holding.name, holding.region) for holding in own}
        for holding in live_weights(self._model):
            is_covered = (holding.name, holding.region) in covered
            if not is_covered:
                yield holding, always_key(MODULE)
        for holding in own:
            yield holding, self._master_key
        for holding in live_buffers(self._model):
            yield holding, always_key(MODULE)

    def _store_masters(self) -> None:
        shards = self._model.optimizer_shards or {}
        store_all(shard for shard in shards.values() if shard is not None)

    def _master_key(self, name: str) -> str:
        return MASTER if self.reader.holds(MASTER, name) else MODULE

    def _sources_of(self, names: Iterable[str]) -> set[str]:
        sources = map(self._sources, names)
        return set(itertools.chain.from_iterable(sources))

    def _wants(self, names: Container[str]) -> Iterator[Want]:
        for holding, key in self._holdings():
            if holding.name in names:
                yield from self._wanted(holding.name, holding.region, key)
        for name, buffer in self._unsaved():
            if name in names:
                whole = TensorRegion.of(tuple(buffer.shape))
                yield UNSAVED, name, whole
        yield from self._wanted_states(names)

    def _wanted_states(self, names: Container[str]) -> Iterator[Want]:
        if self._optimizer is None:
            return
        for entry in updated_parameters(self._model, self._optimizer):
            # The ranks of a parameter's stage have its state; elsewhere it has no values.
            is_here = entry.updated is not None and not entry.parameter.is_meta
            if not is_here or entry.name not in names:
                continue
            for source in self._sources(entry.name):
                keys = self._state_keys.get(source, ())
                for key in keys:
                    if self.reader.is_object(key, source):
                        continue
                    yield from self._wanted(entry.name, entry.region, always_key(key), source)

    def _wanted(
        self, name: str, region: TensorRegion, key: Callable[[str], str], only: str | None = None
    ) -> Iterator[Want]:
        found = self._of.get(name)
        if found is None:
            return
        for source in found.sources:
            is_wanted = only in (None, source) and self.reader.holds(key(source), source)
            if not is_wanted:
                continue
            wanted = region
            record = self.manifest.parameters.get(source)
            # What is computed from a parameter may need any of its elements.
            if not found.is_leaf_of_checkpoint and record is not None:
                wanted = TensorRegion.of(record.shape)
            yield key(source), source, wanted

    def _unsaved(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's buffers that are in no ``state_dict``, if some rank had them before."""
        saved = set(self._model.module.state_dict(keep_vars=True))
        for name, buffer in self._model.local_named_buffers(remove_duplicate=False):
            if name in saved:
                continue
            record = self.manifest.buffers.get(name)
            if record is None:
                continue
            has_shape = tuple(buffer.shape) == record.shape
            if has_shape and self.reader.holds(UNSAVED, name):
                yield name, buffer
