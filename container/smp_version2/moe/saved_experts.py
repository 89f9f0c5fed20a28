"""Sharded checkpoints of mixtures, which have a folder for each expert parallel rank, at other expert parallel degrees.

Ranks that have other experts than those of the save read several folders. What they see is one checkpoint of their own experts:
parameters of many experts begin at the rank's first one, and experts of other ranks are left out.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from smp_config import Group
from smp_runtime.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint import Metadata

    from smp_runtime.job.ranks import Ranks

#: File of a sharded checkpoint that says which experts it has; only with expert parallelism.
EXPERTS_FILE = "smp_experts.json"
#: Names of folders in scripts: the degree, and the rank.
FOLDER = re.compile(r"ep(\d+)-(\d+)")


class ExpertRecord:
    """The experts of a job's models.

    Attributes:
        tables: parameters of many experts, and how many.
        others: beginnings of the names of listed experts that other ranks have.
    """

    def __init__(self) -> None:
        self.tables: dict[str, int] = {}
        self.others: set[str] = set()

    @classmethod
    def of(cls, ranks: Ranks) -> ExpertRecord:
        """Return the record of the running job."""
        return ranks.keep(cls, cls)

    def to_json(self, ranks: Ranks) -> str | None:
        """Return the content of :data:`EXPERTS_FILE` for this rank's part; None without expert parallelism."""
        if ranks.size(Group.EP) == 1:
            return None
        place = {
            "expert_parallel_degree": ranks.size(Group.EP),
            "expert_parallel_rank": ranks.rank_in(Group.EP),
            "tables": self.tables,
        }
        return json.dumps(place, indent=1)


@dataclass(frozen=True)
class SavedPart:
    """The checkpoint of one expert parallel rank.

    Attributes:
        folder: its name in the folder of all of them; empty if it has all experts.
        about: the content of :data:`EXPERTS_FILE`; empty without.
    """

    folder: str
    metadata: Metadata
    about: dict[str, Any]

    @property
    def place(self) -> tuple[int, int]:
        """Return the expert parallel degree and rank of the save."""
        named = FOLDER.fullmatch(self.folder)
        degree, rank = map(int, named.groups()) if named else (1, 0)
        return self.about.get("expert_parallel_degree", degree), self.about.get("expert_parallel_rank", rank)


def check_parts(where: str, parts: list[SavedPart]) -> list[SavedPart]:
    """Return the parts of a checkpoint in the order of their ranks.

    Raises:
        CheckpointError: they are not all parts of one checkpoint.
    """
    ordered = sorted(parts, key=lambda part: part.place)
    degree = ordered[0].place[0]
    if [part.place for part in ordered] != [(degree, rank) for rank in range(degree)]:
        named = ", ".join(part.folder for part in ordered)
        raise CheckpointError(
            f"{where} has the checkpoints {named}, which are not those of all expert parallel ranks of one save: name a "
            "folder that has one for each, such as ep2-0 and ep2-1, or load a full state dict"
        )
    if degree > 1 and not all(part.about for part in ordered):
        raise CheckpointError(
            f"{where} has checkpoints of {degree} expert parallel ranks without {EXPERTS_FILE}, which says what experts they have: "
            f"load them at expert_parallel_degree {degree}, and save there by torch.sagemaker.distributed.checkpoint."
            "state_dict_saver, or a full state dict"
        )
    return ordered


def join(parts: list[SavedPart], record: ExpertRecord, degree: int, rank: int) -> Metadata:
    """Return what describes the checkpoint of one rank's experts in the files of all parts.

    Args:
        record: the experts of the job that loads.
        degree: its expert parallel degree.
        rank: the place of the rank that loads.
    """
    tables = dict(record.tables)
    for part in parts:
        tables |= part.about.get("tables", {})
    values: dict[str, Any] = {}
    planned: dict[str, Any] = {}
    stored: dict[MetadataIndex, Any] = {}
    for place, part in enumerate(parts):
        shifts: dict[str, int] = {}
        for key, saved in part.metadata.state_dict_metadata.items():
            experts = _experts_of(key, saved, tables, len(parts))
            if any(f".{other}." in f".{key}." for other in record.others) or (key in values and not experts):
                continue
            shifts[key] = place * (experts // len(parts)) - rank * (experts // degree)
            made: Any = _shift(saved, shifts[key], experts // degree) if experts else saved
            if key in values:
                made = dataclasses.replace(
                    made, chunks=[*values[key].chunks, *made.chunks]
                )  # in files of several parts
            values[key] = made
            if part.metadata.planner_data is not None and key in part.metadata.planner_data:
                planned[key] = part.metadata.planner_data[key]
        stored |= _locate(part, shifts)
    return dataclasses.replace(
        parts[0].metadata, state_dict_metadata=values, planner_data=planned or None, storage_data=stored
    )


def _experts_of(key: str, saved: Any, tables: dict[str, int], parts: int) -> int:
    """Return how many experts all parts of a tensor have together; 0 for tensors of another kind."""
    if not isinstance(saved, TensorStorageMetadata) or not saved.size:
        return 0
    experts = next((count for name, count in tables.items() if f".{name}." in f".{key}."), 0)
    return experts if saved.size[0] * parts == experts else 0


def _shift(saved: Any, rows: int, count: int) -> Any:
    """Return what describes a part of a tensor as seen from another first expert; it may begin before that one."""
    chunks = [
        dataclasses.replace(chunk, offsets=torch.Size([chunk.offsets[0] + rows, *chunk.offsets[1:]]))
        for chunk in saved.chunks
        if -chunk.sizes[0] < chunk.offsets[0] + rows < count
    ]
    return dataclasses.replace(saved, size=torch.Size([count, *saved.size[1:]]), chunks=chunks)


def _locate(part: SavedPart, shifts: dict[str, int]) -> dict[MetadataIndex, Any]:
    """Return the places of a part's tensors in the files below the folder of all parts."""
    found: dict[MetadataIndex, Any] = {}
    for index, place in (part.metadata.storage_data or {}).items():
        if index.fqn not in shifts:
            continue
        rows = shifts[index.fqn]
        offset = index.offset
        if offset is not None and rows:
            offset = torch.Size([offset[0] + rows, *offset[1:]])
        path = f"{part.folder}/{place.relative_path}" if part.folder else place.relative_path
        # The position in the list of chunks is only a hint, and would be that of another part.
        found[MetadataIndex(index.fqn, offset)] = dataclasses.replace(place, relative_path=path)
    return found
