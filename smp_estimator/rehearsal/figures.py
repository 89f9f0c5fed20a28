"""Pictures of a rehearsal: the memory of each stage over a step, its computations over time, and its traffic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from smp_config import ConfigError
from smp_estimator.figures.matplotlib_figure import DARK, LIGHT, Theme
from smp_estimator.rehearsal.curves import memory_curves
from smp_estimator.rehearsal.timeline import job_timeline, timelines_of
from smp_estimator.timeline.links import LinkTraffic, save_link_picture
from smp_estimator.timeline.memory import save_memory_picture
from smp_estimator.timeline.views import save_picture

if TYPE_CHECKING:
    from smp_estimator.rehearsal.result import Rehearsed
    from smp_estimator.timeline.memory import MemoryCurve


def curves_of(found: Rehearsed) -> list[MemoryCurve]:
    """Return the memory of a rank of each stage over the last step, without the script's data in host memory."""
    return memory_curves(found.rehearsal.kinds, found.gpu_memory_bytes)


def links_of(found: Rehearsed) -> list[LinkTraffic]:
    """Return the traffic of a rank of each stage in the last step: to other stages, and in its collectives."""
    traffic = []
    for kind in found.rehearsal.kinds:
        last, source = kind.steps - 1, f"stage {kind.stage}"
        for link in kind.links:
            if link.step == last:
                target = f"stage {link.stage}"
                traffic.append(
                    LinkTraffic(source, target, link.tensor_bytes, link.messages, "messages", link.same_host)
                )
        for one in kind.collectives:
            if one.step == last:
                what = f"{one.kind} in {one.phase}"
                traffic.append(LinkTraffic(source, one.group, one.sent_bytes, one.calls, what, one.hosts == 1))
    return traffic


def save_memory(found: Rehearsed, path: str | Path, theme: Theme = LIGHT) -> Path:
    """Draw the memory of each stage over a step; the ending of ``path`` sets the format.

    Raises:
        ConfigError: there is nothing to draw, or matplotlib does not know the format.
        PackageMissing: matplotlib is not installed.
    """
    curves = curves_of(found)
    return save_memory_picture(curves, path, theme)


def save_links(found: Rehearsed, path: str | Path, theme: Theme = LIGHT) -> Path:
    """Draw the bytes that each stage sends to others in a step; as :func:`save_memory`."""
    return save_link_picture(links_of(found), path, theme)


def save_order(found: Rehearsed, path: str | Path, theme: Theme = LIGHT) -> Path:
    """Draw the computations of a rank of each stage over time; as :func:`save_memory`."""
    return save_picture(job_timeline(timelines_of(found)).step(), path, theme)


def save_all(found: Rehearsed, folder: str | Path) -> list[Path]:
    """Draw all three pictures for light and for dark pages, as PNG; skip pictures without data.

    Raises:
        ConfigError: the folder cannot be written to.
        RuntimeError: matplotlib is not installed.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made: {error.strerror}; name another folder for the pictures", code="SMP120"
        ) from None
    drawings: list[tuple[str, Callable[[Rehearsed, Path, Theme], Path]]] = []
    if curves_of(found):
        drawings.append(("memory", save_memory))
    if any(link.sent_bytes for link in links_of(found)):
        drawings.append(("links", save_links))
    if found.rehearsal.has_times:
        drawings.append(("timeline", save_order))
    return [
        draw(found, Path(folder, f"{name}{ending}.png"), theme)
        for name, draw in drawings
        for ending, theme in (("", LIGHT), ("-dark", DARK))
    ]


__all__ = ["curves_of", "links_of", "save_all", "save_links", "save_memory", "save_order"]
