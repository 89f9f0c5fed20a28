"""Makes NCCL 2.30.7 small enough to travel to a machine with an H100: its wheel without parts that this GPU never loads.

    python slim_nccl.py FOLDER

Downloads the wheel by pip and writes ``FOLDER/libnccl.so.2.gz`` (15 MB; the wheel has 216). Code for GPUs of other
architectures and code for linking on the device is overwritten with zeros, debug symbols are removed, host code stays. Needs
``readelf`` and ``strip``. NCCL 2.30 is the first release that lets several ranks share a GPU. The checks unpack it and use it
if it is in ``.gpu/nccl``. By hand:

    gunzip -c .gpu/nccl/libnccl.so.2.gz > /tmp/libnccl.so.2
    export LD_PRELOAD=/tmp/libnccl.so.2 NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=4 NCCL_NET_GDR_LEVEL=LOC
    timeout 60 torchrun --nproc-per-node 2 benchmarks/gpu_check/multirank.py nccl

If that fails, try ``NCCL_P2P_DISABLE=1``, then ``NCCL_SHM_DISABLE=1``.
"""

from __future__ import annotations

import gzip
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_WHEEL = "nvidia-nccl-cu13==2.30.7"
_PLATFORM = "manylinux_2_18_x86_64"
#: First word of a container of GPU code, and the architecture whose code is kept (compute capability 9.0).
_MAGIC, _KEPT = 0xBA55ED50, 90


def find_sections(library: Path, pattern: str) -> list[tuple[int, int]]:
    """Return offset and size of the ELF sections with matching names."""
    listing = subprocess.run(["readelf", "-SW", library], capture_output=True, text=True, check=True).stdout
    found = re.finditer(rf"\]\s+{pattern}\s+\S+\s+[0-9a-f]+\s+([0-9a-f]+)\s+([0-9a-f]+)", listing)
    return [(int(match.group(1), 16), int(match.group(2), 16)) for match in found]


def erase_other_gpus(library: Path) -> None:
    """Overwrite the code for GPUs of other architectures with zeros, which compress to almost nothing."""
    data = bytearray(library.read_bytes())
    for start, size in find_sections(library, r"\.nv_fatbin\S*"):
        at, end = start, start + size
        while at < end - 16:
            magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
            if magic != _MAGIC:
                at += 8
                continue
            _erase_images(data, at + header, at + header + length)
            at = (at + header + length + 7) & ~7
    for start, size in find_sections(library, "__nv_relfatbin"):
        data[start : start + size] = bytes(size)
    library.write_bytes(data)


def _erase_images(data: bytearray, start: int, end: int) -> None:
    """Erase the images of one container, each of which has the code for one architecture."""
    while start < end:
        _, _, header, size = struct.unpack_from("<HHIQ", data, start)
        architecture = struct.unpack_from("<I", data, start + 28)[0]
        if architecture != _KEPT:
            data[start + header : start + header + size] = bytes(size)
        if header == 0:
            return
        start += header + size


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    packed = folder / "libnccl.so.2.gz"
    with tempfile.TemporaryDirectory() as scratch:
        options = ["--no-deps", "--only-binary=:all:", "--platform", _PLATFORM]
        command = [sys.executable, "-m", "pip", "download", "-q", "-d", scratch, *options, _WHEEL]
        subprocess.run(command, check=True)
        wheel = zipfile.ZipFile(next(Path(scratch).glob("*.whl")))
        name = next(name for name in wheel.namelist() if name.endswith("libnccl.so.2"))
        library = Path(wheel.extract(name, scratch))
        subprocess.run(["strip", "--strip-debug", library], check=True)
        erase_other_gpus(library)
        with library.open("rb") as source, gzip.open(packed, "wb", 9) as target:
            shutil.copyfileobj(source, target)
    print(packed, packed.stat().st_size >> 20, "MiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
