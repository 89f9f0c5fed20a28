"""Errors of checkpoints, how the ranks of a group learn of those of each other, and which of them write."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from smp_runtime.checkpoint.rank_agreement import StoreExchange, second_connection
from smp_runtime.comm.authentication import Seal
from smp_runtime.errors import CheckpointError
from smp_version2.checkpoint.local_shards import LocalShard
from smp_version2.state import state

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks


class MissingKeysError(CheckpointError, KeyError):
    """A checkpoint lacks keys that a script wants to load. It is a ``KeyError``, for scripts that then ask for older keys."""

    def __str__(self) -> str:
        """Return the message; a ``KeyError`` would put it in quotes."""
        return Exception.__str__(self)


def list_ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group, of all ranks for None."""
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def agree(problem: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise an error on all ranks of a group if one of them has it; all of them call this.

    Raises:
        CheckpointError: another rank has a problem. A rank with a problem of its own raises that.
    """
    found: list[Any] = [None] * dist.get_world_size(group)
    mine = None if problem is None else (type(problem).__name__, str(problem))
    dist.all_gather_object(found, mine, group=group)
    if problem is not None:
        raise problem
    for rank, theirs in zip(list_ranks(group), found, strict=True):
        if theirs is None:
            continue
        name, text = theirs
        kind = MissingKeysError if name == MissingKeysError.__name__ else CheckpointError
        raise kind(f"rank {rank}: {text}")


def require_one_place(place: str, group: dist.ProcessGroup | None) -> None:
    """Raise an error on all ranks of a group if they would write one checkpoint into different folders; all of them call this.

    One rank writes the metadata, so nothing could be loaded from the folders of the others. Local shards come here if FSDP has
    numbered ranks that are copies of each other, as it does without sharding.

    Raises:
        CheckpointError: the ranks have named different places.
    """
    found: list[Any] = [None] * dist.get_world_size(group)
    if len(found) == 1:
        return
    dist.all_gather_object(found, place, group=group)
    ranks = list_ranks(group)
    for rank, each in zip(ranks, found, strict=True):
        if each != found[0]:
            raise CheckpointError(
                f"the checkpoint was not saved: ranks {', '.join(map(str, ranks))} save it together, rank {ranks[0]} to {found[0]} "
                f"and rank {rank} to {each}; name the same place on all ranks of process_group, or pass a group for each place"
            )


def describe_failures(what: str, failures: dict[int, Any], group: dist.ProcessGroup | None) -> CheckpointError:
    """Return the error for what PyTorch reports of ranks that could not save or load.

    Args:
        what: the first words of the message.
        failures: by rank in the group, the error and where it came about.
    """
    ranks = list_ranks(group)
    first = min(failures)
    error = failures[first][0]
    words = f"{what}: rank {ranks[first]}: {type(error).__name__}: {error}"
    if len(failures) > 1:
        words += f" (and {len(failures) - 1} more of its {len(ranks)} ranks)"
    return CheckpointError(words)


class SavesOfCopies(StoreExchange):
    """Saves of a group whose ranks are copies of each other, as without sharding: one rank writes, and the others wait for it.

    Scripts let one of the copies save, and name the group of all of them. In others, all ranks save. The rank that writes cannot
    know which, so it waits for no one, and leaves word in the job's store.
    """

    def __init__(self, ranks: Ranks) -> None:
        found = second_connection(ranks.control, "smp-save", "saves of copies") if ranks.control.size > 1 else None
        self.is_possible = found is not None  # an older PyTorch has no second connection
        if found is not None:
            # Unlike that of an earlier job of this process, since the store may be the same.
            title = Seal(found.secret).derived("title", b"").hex()[:16]
            super().__init__(found.store, ranks.rank, ranks.control.size, title, found.secret)
        self._saves: Counter[tuple[int, str]] = Counter()

    def save(self, writer: int, others: list[int], place: str, keys: list[str], write: Callable[[], None]) -> None:
        """Write on one rank, and block until it has written on others.

        Args:
            writer: the rank that writes.
            others: the ranks that may wait for it.
            keys: what this rank would have saved.

        Raises:
            CheckpointError: it could not write, or this rank has other keys.
            DeadlineError: it has not written.
        """
        self._saves[writer, place] += 1
        digest = hashlib.sha256("\n".join(keys).encode()).hexdigest()
        where = hashlib.sha256(place.encode()).hexdigest()[:16]
        title = f"{self._title}/{writer}/{where}/{self._saves[writer, place]}"
        if writer == self._rank:
            problem = "the save has ended early"
            try:
                write()
                problem = ""
            except Exception as error:
                problem = str(error)
                raise
            finally:
                # The others wait for this word whether the save has worked or not, also after Ctrl-C.
                for rank in others:
                    self._put(f"{title}/{rank}", [problem, digest])
            return
        problem, found = self._take(f"{title}/{self._rank}", f"rank {writer}")
        if problem:
            raise CheckpointError(f"rank {writer}: {problem}")
        if found != digest:
            raise CheckpointError(
                f"the checkpoint {place} has what rank {writer} has saved, and rank {self._rank} saves other keys: without "
                "sharding one rank of process_group writes for all; leave process_group out, so that all ranks write"
            )


def find_copies(state_dict: Mapping[str, Any], group: dist.ProcessGroup | None) -> tuple[int, list[int]] | None:
    """Return the rank that writes for this one, and the others of a group that have the same state.

    None if all ranks of the group write together: they share the state out, or nothing says that they are copies.
    """
    if group is None or not state.is_joined or not state.shares_nothing:
        return None
    ranks = list_ranks(group)
    copies = next(members for members in state.ranker.get_rep_groups() if state.rank in members)
    writer, *others = copies
    if len(ranks) == 1 or writer not in ranks:
        return None
    if _has_parts(state_dict):
        return None
    waiting = [rank for rank in others if rank in ranks]
    return writer, waiting


def _has_parts(state_dict: Mapping[str, Any]) -> bool:
    """Return whether a state dict has values that the ranks share out."""
    for key, value in _leaves(state_dict):
        if LocalShard.of_key(key) is not None or _is_part(value):
            return True
    return False


def save_once(
    state_dict: Mapping[str, Any], group: dist.ProcessGroup | None, place: str, write: Callable[[], None]
) -> Callable[[], None] | None:
    """Return the function that saves if one rank of a group writes for others; None if all of them write together.

    Args:
        write: saves on this rank alone.
    """
    copies = find_copies(state_dict, group)
    saves = state.joined.keep(SavesOfCopies, lambda: SavesOfCopies(state.joined)) if copies is not None else None
    if copies is None or saves is None or not saves.is_possible:
        return None
    writer, others = copies
    keys = sorted(key for key, _ in _leaves(state_dict))
    return lambda: saves.save(writer, others, place, keys, write)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what nested dictionaries hold, by joined keys."""
    for key, each in value.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(each, Mapping):
            yield from _leaves(each, name)
        else:
            yield name, each


def _is_part(value: Any) -> bool:
    """Return whether a tensor is shared out over several ranks."""
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        return any(each.is_shard() and mesh.size(dim) > 1 for dim, each in enumerate(value.placements))
    return hasattr(value, "local_shards")  # those of FullyShardedDataParallel, whose class is private
