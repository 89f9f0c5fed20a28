"""How far a job has come in the order of a data set: one number for all ranks, which checkpoints keep."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from smp_config import Group
from smp_config.formats.values import is_integer
from smp_runtime.errors import CheckpointError, SMPUserError
from smp_runtime.job import session as sessions

if TYPE_CHECKING:
    from smp_config import ModelParallelParameters
    from smp_runtime.job.ranks import Ranks


def batch_group(ranks: Ranks) -> Group:
    """Return the group of ranks with different batches.

    These are the replicas, and without ``prescaled_batch`` tensor parallel ranks too.
    """
    return batch_group_of(ranks.cfg)


def batch_group_of(parameters: ModelParallelParameters) -> Group:
    """Return the group of ranks with different batches for a job's settings; see :func:`batch_group`."""
    return Group.BATCH_RDP if parameters.prescaled_batch else Group.BATCH_DP


def place_among_readers(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of ranks that divide the samples, and this rank's place among them.

    Args:
        num_replicas: None for as many as read different samples in this job.
        rank: None for this rank's place among them.

    Raises:
        NotInitializedError: one of them is None, and the job has not begun.
        SMPUserError: no rank has that number.
    """
    if num_replicas is None or rank is None:
        ranks = sessions.current_session().ranks
        group = batch_group(ranks)
        num_replicas = ranks.size(group) if num_replicas is None else num_replicas
        rank = ranks.rank_in(group) if rank is None else rank
    if not 0 <= rank < num_replicas:
        raise SMPUserError(
            f"rank is {rank} and num_replicas {num_replicas}, but ranks count from 0 to {num_replicas - 1}; leave both out, "
            "and the job's own are taken",
            code="SMP310",
        )
    return num_replicas, rank


@dataclass
class DataPosition:
    """A position in the order of a data set.

    Attributes:
        index: samples of the epoch that all ranks together were given.
        first: the index at which passes of this epoch begin; not 0 if the job was resumed in the middle of the
            epoch.
        end: the index behind the last sample of the pass; None if unknown.
        is_resumed: whether no pass has begun since the job was resumed.
        is_numbered: whether the script numbers its epochs.
        is_counted_by_loader: whether a loader counts the samples of this pass that the script gets, because they
            are drawn earlier.
    """

    epoch: int = 0
    index: int = 0
    first: int = 0
    end: int | None = None
    is_resumed: bool = False
    is_numbered: bool = False
    is_counted_by_loader: bool = False

    def begin(self, epoch: int) -> int | None:
        """Begin a pass and return its first index; None for an epoch before the resumed one."""
        if self.is_resumed and epoch < self.epoch:
            return None
        if epoch != self.epoch:
            self.first = 0
        self.epoch, self.index, self.end, self.is_resumed = epoch, self.first, None, False
        return self.first

    def hand_out(self, samples: int) -> None:
        """Count samples that the ranks together get, up to the end of the pass."""
        self.index = self.index + samples if self.end is None else min(self.index + samples, self.end)

    def complete(self) -> None:
        """Record the end of a pass, so that the next one starts at index 0."""
        if self.is_resumed:  # it was one of an earlier epoch
            return
        self.first = 0
        if not self.is_numbered:  # the next pass has the same epoch, but it does not repeat trained samples
            self.index = 0


class Loader(Protocol):
    """What makes batches of the samples of a source."""

    @property
    def batch_size_here(self) -> int:
        """Return the number of samples of a batch on this rank."""

    def divide(self, before: int, after: int) -> None:
        """Change the batch size so that ``after`` ranks share the global batch of ``before`` ranks."""


class SampleSource:
    """A source of samples in an order of the job: the common base of the sampler and of streams.

    Args:
        seed: of the order; None if the data set has its own order.
        name: under which checkpoints keep the position; None for a number, in the order in which sources are
            made.
        kept: whether checkpoints keep it at all.
    """

    def _begin_source(self, seed: int | None, name: str | None, *, kept: bool) -> None:
        """Register the source; call it last in a constructor, since a resumed checkpoint may set the position."""
        self.seed_of_order = seed
        self.position = DataPosition()
        self.is_kept = kept
        self.times_regrouped = 0
        self.loaders: weakref.WeakSet[Loader] = weakref.WeakSet()
        self.follows_job = sessions.is_initialized() and (self.num_replicas, self.rank) == place_among_readers(
            None, None
        )
        if sessions.is_initialized():
            Sources.of(sessions.current_session().ranks).add(self)
        if kept and sessions.is_initialized():
            SourcePositions.of(sessions.current_session().ranks).add(self, name)

    # -- other numbers of ranks ------------------------------------------------------------------------------------

    num_replicas: int
    rank: int

    def why_not(self, wanted: ModelParallelParameters) -> str:
        """Return why samples cannot be divided among the ranks of other degrees; empty if they can."""
        if not self.follows_job:
            return ""
        ranks = sessions.current_session().ranks
        readers = wanted.topology(ranks.control.size).size(batch_group_of(wanted))
        for loader in self.loaders:
            together = loader.batch_size_here * self.num_replicas
            if together % readers:
                return (
                    f"{self.num_replicas} ranks read batches of {loader.batch_size_here}, {together} samples together, which "
                    f"{readers} ranks cannot divide evenly; choose a batch size that they can"
                )
        return ""

    def regroup(self) -> None:
        """Continue at the same position with the job's present ranks; passes that are running begin anew there.

        Loaders change their batch size, so that all ranks together read as many samples as before.
        """
        if self.follows_job:
            before = self.num_replicas
            self.num_replicas, self.rank = place_among_readers(None, None)
            for loader in self.loaders:
                loader.divide(before, self.num_replicas)
        self._ranks_changed()
        numbered, counted = self.position.is_numbered, self.position.is_counted_by_loader
        self.load_state_dict(self.state_dict())
        self.position.is_numbered, self.position.is_counted_by_loader = numbered, counted
        self.times_regrouped += 1

    def _ranks_changed(self) -> None:
        """Update values that depend on the number of ranks."""

    def _samples(self) -> int | None:
        """Return the number of samples in the data set; None if unknown."""
        raise NotImplementedError

    def _resume_at(self, epoch: int, seed: int | None) -> None:
        """Take over the order in which a job has trained."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return ``epoch``, ``index``, ``seed`` and ``samples``.

        ``index`` counts the samples of that epoch that all ranks together were given.
        """
        at = self.position
        return {"epoch": at.epoch, "index": at.index, "seed": self.seed_of_order, "samples": self._samples()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position, with any number of ranks; the saved seed is used.

        Raises:
            SMPUserError: the state is of a data set with another number of samples, or no state.
        """
        self.check_state(state)
        epoch, index = state["epoch"], state["index"]
        self.position = DataPosition(epoch, index, first=index, is_resumed=True, is_numbered=self.position.is_numbered)
        self._resume_at(state["epoch"], state["seed"])

    def check_state(self, state: Any) -> None:
        """Raise as :meth:`load_state_dict` would; nothing is loaded."""
        _check_numbers(state)
        here, there = self._samples(), state["samples"]
        if None not in (here, there) and here != there:
            raise SMPUserError(
                f"the job that was saved read a data set of {there:,} samples, but this one has {here:,}, so that the order is "
                "another one; give the same data set, or another name= to begin a new one at its beginning",
                code="SMP310",
            )


def _check_numbers(state: Any) -> None:
    """Raise SMPUserError unless a state has the required numbers."""
    if not _is_position(state):
        raise SMPUserError(
            f"the state of a data set is {str(state)[:200]}, but has whole numbers for epoch, index, seed and samples; pass what "
            "state_dict() gave",
            code="SMP310",
        )


def _is_position(state: Any) -> bool:
    """Return whether a state has the numbers of a position: epoch and index, and samples and seed if they are known."""
    if not isinstance(state, Mapping) or not state.keys() >= {"epoch", "index", "seed", "samples"}:
        return False
    if state["samples"] is not None and not _is_count(state["samples"]):
        return False
    if state["seed"] is not None and not is_integer(state["seed"]):
        return False
    return _is_count(state["epoch"]) and _is_count(state["index"])


def _is_count(value: Any) -> bool:
    return is_integer(value) and 0 <= value < 2**63


class Sources:
    """All sources of a job that are alive."""

    outlives_regrouping = True

    def __init__(self) -> None:
        self._sources: list[weakref.ref[SampleSource]] = []

    @classmethod
    def of(cls, ranks: Ranks) -> Sources:
        """Return the sources of a job; always the same object."""
        return ranks.keep(cls, cls)

    def add(self, source: SampleSource) -> None:
        """Register a new source."""
        self._sources = [reference for reference in self._sources if reference() is not None]
        # A loader that the script has dropped has no position any more.
        self._sources.append(weakref.ref(source))

    def alive(self) -> list[SampleSource]:
        """Return the sources in the order in which they were made, the same on all ranks."""
        found = [reference() for reference in self._sources]
        return [source for source in found if source is not None]


class KeptState(Protocol):
    """A state of the job that all ranks have alike, and checkpoints keep once."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as text and numbers; empty if there is none."""
        ...

    def check_state(self, state: Any) -> None:
        """Raise CheckpointError unless :meth:`load_state_dict` can load it."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state."""
        ...


#: Under this name checkpoints have other states than positions.
_KEPT = "smp states"


class SourcePositions:
    """The sources of a job that checkpoints keep, by name."""

    outlives_regrouping = True

    def __init__(self) -> None:
        self._sources: dict[str, weakref.ref[SampleSource]] = {}
        self._waiting: dict[str, Mapping[str, Any]] = {}
        self._kept: dict[str, KeptState] = {}

    @classmethod
    def of(cls, ranks: Ranks) -> SourcePositions:
        """Return the positions of a job; always the same object."""
        return ranks.keep(cls, cls)

    def add(self, source: SampleSource, name: str | None) -> None:
        """Register a source; if a resumed checkpoint has its position, it continues there."""
        alive = self._alive()
        if name is None:
            name = next(str(number) for number in range(len(alive) + 1) if str(number) not in alive)
        self._sources[name] = weakref.ref(source)
        if name in self._waiting:
            source.load_state_dict(self._waiting.pop(name))

    def keep(self, name: str, kept: KeptState) -> None:
        """Keep a state of the job that all ranks have alike, beside the positions."""
        self._kept[name] = kept
        if name in self._waiting:
            kept.load_state_dict(self._waiting.pop(name))

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the positions for a checkpoint; empty if the script has no such source."""
        found = {name: source.state_dict() for name, source in self._alive().items()}
        kept = {}
        for name, each in self._kept.items():
            state = each.state_dict()
            if state:
                kept[name] = state
        if kept:
            found[_KEPT] = kept
        return found

    def check(self, states: Any) -> None:
        """Check that states of a checkpoint can be loaded.

        Raises:
            CheckpointError: they cannot.
        """
        alive = self._alive()
        if not isinstance(states, Mapping):
            raise CheckpointError(f"the positions in data sets are {str(states)[:200]}; the checkpoint is damaged")
        for name, state in states.get(_KEPT, {}).items():
            if name in self._kept:
                self._kept[name].check_state(state)
        for name, state in states.items():
            if name == _KEPT:
                continue
            try:
                _check_numbers(state)
                if name in alive:
                    alive[name].check_state(state)
            except SMPUserError as error:
                raise CheckpointError(f"the data set {name!r} cannot go on: {error}") from None

    def load(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Load the saved positions into all sources, including those that are made later."""
        alive = self._alive()
        kept = states.get(_KEPT, {})
        known = {*alive, *self._kept, _KEPT}
        self._waiting = {name: state for name, state in {**kept, **states}.items() if name not in known}
        for name, state in kept.items():
            if name in self._kept:
                self._kept[name].load_state_dict(state)
        for name, source in alive.items():
            if name in states:
                source.load_state_dict(states[name])

    def _alive(self) -> dict[str, SampleSource]:
        alive = {}
        for name, reference in self._sources.items():
            source = reference()
            if source is not None:
                alive[name] = source
        return alive
