"""Errors of checkpoints, and how the ranks of a group learn of those of each other."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from smp_runtime.errors import CheckpointError


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
    dist.all_gather_object(found, None if problem is None else (type(problem).__name__, str(problem)), group=group)
    if problem is not None:
        raise problem
    for rank, each in zip(list_ranks(group), found, strict=True):
        if each is not None:
            kind = MissingKeysError if each[0] == MissingKeysError.__name__ else CheckpointError
            raise kind(f"rank {rank}: {each[1]}")


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
