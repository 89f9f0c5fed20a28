"""Pictures of a rehearsal: the memory of each stage over a step, and who sends how much to whom."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from smp_estimator.rehearsal.curves import memory_curves
from smp_estimator.timeline.links import LinkTraffic, save_link_picture
from smp_estimator.timeline.memory import save_memory_picture

if TYPE_CHECKING:
    from smp_estimator.rehearsal.result import Rehearsed
    from smp_estimator.timeline.memory import MemoryCurve


def curves_of(found: Rehearsed) -> list[MemoryCurve]:
    """The memory of a rank of each stage, over the last step; without what the script keeps in host memory."""
    return memory_curves(found.rehearsal.kinds, found.gpu_memory_bytes)


def links_of(found: Rehearsed) -> list[LinkTraffic]:
    """What a rank of each stage sends to other stages, and to the groups of its collectives, in the last step."""
    traffic = []
    for kind in found.rehearsal.kinds:
        last, source = kind.steps - 1, f"stage {kind.stage}"
        traffic += [
            LinkTraffic(source, f"stage {link.stage}", link.tensor_bytes, link.messages, "messages", link.same_host)
            for link in kind.links
            if link.step == last
        ]
        traffic += [
            LinkTraffic(source, one.group, one.sent_bytes, one.calls, f"{one.kind} in {one.phase}", one.hosts == 1)
            for one in kind.collectives
            if one.step == last
        ]
    return traffic


def save_memory(found: Rehearsed, path: str | Path) -> Path:
    """Draw the memory of each stage over a step; the ending of ``path`` says in which format.

    Raises:
        ConfigError: there is nothing to draw, or matplotlib does not know the format.
        PackageMissing: matplotlib is not installed.
    """
    curves = curves_of(found)
    return save_memory_picture(curves, path)


def save_links(found: Rehearsed, path: str | Path) -> Path:
    """Draw who sends how much to whom in a step; as :func:`save_memory`."""
    return save_link_picture(links_of(found), path)


__all__ = ["curves_of", "links_of", "save_links", "save_memory"]
