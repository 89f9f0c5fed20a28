"""Conversion of partial checkpoints of sharded data parallelism to flat groups, the layout of AWS's tools."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from smp_runtime.checkpoint.files.atomic_file import write_tensors
from smp_runtime.checkpoint.files.manifest import MANIFEST, MASTER, MODULE, Manifest
from smp_runtime.checkpoint.files.reader import CheckpointReader

#: As files are named without tensor and pipeline parallelism.
_OPTIMIZER = "optimizer_{}.pt"


def write_flat_groups(folder: Path, manifest: Manifest, target: Path) -> tuple[list[Path], int]:
    """Write a checkpoint's files into a new folder, with the float32 weights of each rank in ``fp32_flat_groups``.

    Rank *i* has the *i*-th of equal parts of each parameter, in the order of the optimizer's groups, filled up with zeros. The
    folder has no manifest: it is for other tools, and all weights are in memory meanwhile.

    Returns:
        The files with such groups, and the number of parameters in them.

    Raises:
        ValueError: it was not saved under sharded data parallelism alone, or without its optimizer.
        CheckpointError: a file is damaged.
    """
    count = _ranks(manifest)
    reader = CheckpointReader(folder, manifest)
    shapes = _shapes(manifest)
    buffers = _flat_buffers(reader, shapes, count)
    target.mkdir(parents=True, exist_ok=True)
    written = [target / _OPTIMIZER.format(rank) for rank in range(count)]
    for path, own in zip(written, buffers, strict=True):
        content = {**reader.content(path.name), "partition_count": count, "fp32_flat_groups": own}
        write_tensors({**content, "param_shapes": shapes}, path)
    names = {path.name for path in written}
    for name in manifest.files:
        if name not in names and name != MANIFEST:
            with reader.files.opened(name) as source, open(target / name, "wb") as copy:
                shutil.copyfileobj(source, copy)
    return written, sum(map(len, shapes))


def _ranks(manifest: Manifest) -> int:
    """Return the number of ranks that shared each parameter out."""
    degrees = {key: int(manifest.topology.get(key, 1)) for key in ("sharded", "tensor", "pipeline")}
    if degrees["sharded"] < 2 or degrees["tensor"] > 1 or degrees["pipeline"] > 1:
        said = ", ".join(f"{key} {degree}" for key, degree in degrees.items())
        raise ValueError(
            f"the checkpoint was saved at the degrees {said}: flat groups are those of sharded data parallelism without tensor and "
            "pipeline parallelism; for others set SMP_CHECKPOINT_LAYOUT=flat_groups in the job that saves"
        )
    count = degrees["sharded"]
    absent = [name for name in map(_OPTIMIZER.format, range(count)) if name not in manifest.files]
    if manifest.optimizer is None or absent:
        raise ValueError(
            f"the checkpoint has no {', '.join(absent) or 'optimizer'}: flat groups are the optimizer's weights"
        )
    return count


def _shapes(manifest: Manifest) -> list[dict[str, list[int]]]:
    """Return the shapes of the trained parameters of each group of the optimizer, in order."""
    groups = manifest.optimizer.groups if manifest.optimizer is not None else []
    return [
        {name: list(manifest.parameters[name].shape) for name in group["params"] if manifest.parameters[name].trained}
        for group in groups
    ]


def _flat_buffers(reader: CheckpointReader, shapes: list[dict[str, list[int]]], count: int) -> list[list[torch.Tensor]]:
    """Return the buffers of each rank, one for each group."""
    names = list(itertools.chain.from_iterable(shapes))
    keys = {name: MASTER if reader.holds(MASTER, name) else MODULE for name in names}
    types = {reader.dtype_of(keys[name], name) for name in names}
    dtype = functools.reduce(torch.promote_types, types, torch.float32)
    buffers: list[list[torch.Tensor]] = [[] for _ in range(count)]
    for group in shapes:
        for own, parts in zip(buffers, zip(*_parts(reader, group, keys, dtype, count), strict=True), strict=True):
            own.append(torch.cat(parts))
    return buffers


def _parts(
    reader: CheckpointReader, names: dict[str, Any], keys: dict[str, str], dtype: torch.dtype, count: int
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the equal parts of each parameter, the last filled up with zeros; first those of none, for a group without any."""
    yield (torch.zeros(0, dtype=dtype),) * count
    for name in names:
        flat = reader.whole(keys[name], name).reshape(-1)
        share = -(-flat.numel() // count)
        padded = torch.zeros(share * count, dtype=dtype)
        padded[: flat.numel()].copy_(flat)
        yield padded.split(share) if share else (padded,) * count
