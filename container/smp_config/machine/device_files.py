"""The GPUs of this host by their files in ``/dev``, without loading a driver."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: Empty, or -1, hides all GPUs from a process: it then computes on the CPU on purpose.
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"


def nvidia_devices(folder: Path = Path("/dev")) -> list[str]:
    """Return the files of NVIDIA's GPUs, by number."""
    numbers = []
    for path in folder.glob("nvidia[0-9]*"):
        name = path.name.removeprefix("nvidia")
        if name.isdigit():
            numbers.append(int(name))
    return [str(folder / f"nvidia{number}") for number in sorted(numbers)]


def count_visible(devices: int, environ: Mapping[str, str]) -> int:
    """Return how many of a host's GPUs an environment leaves visible.

    Args:
        devices: the host's GPUs.
    """
    visible = environ.get(VISIBLE_VARIABLE)
    if visible is None:
        return devices
    words = [word.strip() for word in visible.split(",")]
    chosen = [word for word in words if word not in ("", "-1")]
    return min(len(chosen), devices)
