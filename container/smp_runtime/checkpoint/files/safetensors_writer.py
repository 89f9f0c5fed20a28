"""One ``.safetensors`` file, written tensor by tensor: no more than one is in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.checkpoint.files.atomic_file import Records, record_written, whole_file, written_file
from smp_runtime.errors import SMPUserError

if TYPE_CHECKING:
    from smp_runtime.checkpoint.files.checksums import WrittenFile

#: The format's names of types.
_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
#: Bytes handed to the file at once.
_CHUNK = 16 * 2**20


def size_of(value: torch.Tensor) -> int:
    """Return the size of a tensor in the file in bytes; the tensor may have no values."""
    return math.prod(value.shape) * value.dtype.itemsize


def as_it_is(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor unchanged, because it already has its values."""
    return value


def write_safetensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    make: Callable[[torch.Tensor], torch.Tensor] = as_it_is,
    metadata: Mapping[str, str] | None = None,
    records: Records | None = None,
) -> None:
    """Write ``tensors`` as one file that appears only when it is complete.

    Args:
        path: of the file; its folder exists.
        tensors: by name.
        make: returns the values of a tensor that may have none yet; called for one after the other.
        metadata: put into the file's header.
        records: takes the file's length and checksum.

    Raises:
        SMPUserError: a type that the format does not have.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}  # Transformers asks for it
    end = 0
    # Larger types first, so that each tensor is aligned and a mapped file can be used without copying.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    for name, value in tensors.items():
        if value.dtype not in _NAMES:
            raise SMPUserError(
                f"{name} is of type {value.dtype}, which a safetensors file cannot hold; save with torch.save, for example "
                'with tag="pytorch_model.bin"',
                code="SMP402",
            )
        start, end = end, end + size_of(value)
        header[name] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at multiples of 8
    with whole_file(path, end + len(text) + 8) as temporary, open(temporary, "wb") as file:
        stream = written_file(file, records)
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for value in tensors.values():
            _write(make(value), stream)
        record_written(stream, path, records)


def _write(value: torch.Tensor, file: WrittenFile) -> None:
    if value.numel() == 0:
        return
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    for part in raw.split(_CHUNK):
        file.write(part.numpy().data)
