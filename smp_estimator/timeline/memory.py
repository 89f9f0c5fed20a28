"""The memory of a rank over a step, by what holds it: its peak, and a picture of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_config import ConfigError
from smp_estimator.figures.matplotlib_figure import LIGHT, Theme, colour_axes, figure_for, save
from smp_estimator.figures.svg import colour
from smp_estimator.timeline.links import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GB = 1e9

#: Owners in the order in which they lie on one another: what stays from step to step is below.
OWNERS = ("parameter", "optimizer state", "gradient", "buffer", "activation", "other")

#: Panels of more ranks are too low to be read; those with the highest peaks are drawn.
_MOST_PANELS = 8

#: The device's size is drawn as a line if the peak is above this part of it. Otherwise the curve would be too low.
_NEAR = 0.4

#: Characters of a peak's owner that are drawn. A longer path loses its middle, because its end is more informative.
_MOST_CHARACTERS = 80

#: Points of one curve; of more, each part of the time keeps its highest.
_MOST_POINTS = 2000


@dataclass(frozen=True)
class MemoryCurve:
    """Live bytes of one rank, from each time on as they are there until the next.

    Attributes:
        label: of the rank, such as ``"stage 3, rank 24"``.
        seconds: ascending times at which something changed.
        owners: by owner, the bytes from each of these times on; one of :data:`OWNERS`, or a word of one's own.
        device_bytes: memory of its GPU; None where it is not known.
        peak_owner: who made the peak, in words: module path and phase.
        phases: begin and end of what the step did, with a word each, such as ``"forward"``.
    """

    label: str
    seconds: Sequence[float]
    owners: Mapping[str, Sequence[int]]
    device_bytes: int | None = None
    peak_owner: str = ""
    phases: Sequence[tuple[float, float, str]] = ()

    def __post_init__(self) -> None:
        for owner, held in self.owners.items():
            if len(held) != len(self.seconds):
                raise ConfigError(
                    f"the memory of {self.label} has {len(self.seconds)} times and {len(held)} sizes of {owner}; each size holds "
                    "from a time on: give one for each",
                    code="SMP116",
                )
        if not self.seconds or not self.owners:
            raise ConfigError(
                f"the memory of {self.label} has no times or no owners; there is nothing to draw", code="SMP116"
            )
        goes_back = any(later < earlier for earlier, later in itertools.pairwise(self.seconds))
        if goes_back:
            raise ConfigError(f"the times of the memory of {self.label} are not ascending; sort them", code="SMP116")

    @property
    def totals(self) -> list[int]:
        """Return the bytes of all owners from each time on."""
        return [sum(held) for held in zip(*self.owners.values(), strict=True)]

    @property
    def peak(self) -> tuple[float, int]:
        """Return the first time at which most bytes were live, and how many bytes."""
        totals = self.totals
        most = max(totals)
        return self.seconds[totals.index(most)], most

    @property
    def at_peak(self) -> dict[str, int]:
        """Return the bytes by owner at the peak, those of :data:`OWNERS` first."""
        totals = self.totals
        at = totals.index(max(totals))
        return {owner: self.owners[owner][at] for owner in self.ordered}

    @property
    def ordered(self) -> list[str]:
        """Return the owners in drawing order, from the bottom up."""
        known = [owner for owner in OWNERS if owner in self.owners]
        return [*known, *sorted(owner for owner in self.owners if owner not in OWNERS)]

    @property
    def fits(self) -> bool | None:
        """Return whether the peak fits the device; None if the device's size is not known."""
        return None if self.device_bytes is None else self.peak[1] <= self.device_bytes

    def thinned(self, most: int = _MOST_POINTS) -> MemoryCurve:
        """Return the curve with at most ``most`` points.

        Each interval keeps its highest point, so that no peak is lost.
        """
        count = len(self.seconds)
        if count <= most:
            return self
        totals = self.totals
        size = math.ceil(count / most)
        kept = [max(range(first, min(first + size, count)), key=totals.__getitem__) for first in range(0, count, size)]
        return MemoryCurve(
            self.label,
            [self.seconds[at] for at in kept],
            {owner: [held[at] for at in kept] for owner, held in self.owners.items()},
            self.device_bytes,
            self.peak_owner,
            self.phases,
        )


def save_memory_picture(curves: Sequence[MemoryCurve], path: str | Path, theme: Theme = LIGHT) -> Path:
    """Draw the memory of ranks over a step, one panel each: stacked owners, the peak, and the size of the device.

    Args:
        curves: the ranks' memory. Only the 8 ranks with the highest peaks are drawn; the title notes how many are
            not.
        path: its suffix selects the format (``.png``, ``.svg``, ``.pdf``).

    Raises:
        ConfigError: no curves, or a format that matplotlib does not know.
        PackageMissing: matplotlib is not installed.
    """
    if not curves:
        raise ConfigError(
            "there is no memory to draw: no rank was given; give the curve of at least one", code="SMP116"
        )
    highest = sorted(curves, key=lambda curve: -curve.peak[1])[:_MOST_PANELS]
    drawn = [curve.thinned() for curve in curves if any(curve is one for one in highest)]
    figure = figure_for(path, 11.0, 0.9 + 2.1 * len(drawn), theme)
    start = min(curve.seconds[0] for curve in drawn)
    stop = max(max(curve.seconds[-1], *(end for _, end, _ in curve.phases), start) for curve in drawn)
    top = max(_top(curve) for curve in drawn)
    names = sorted({owner for curve in drawn for owner in curve.ordered}, key=_place)
    colours = {owner: colour(number) for number, owner in enumerate(names)}
    for number, curve in enumerate(drawn):
        axes = colour_axes(figure.add_subplot(len(drawn), 1, number + 1), theme)
        _draw(axes, curve, colours, theme, (start, stop, top))
        if number + 1 < len(drawn):
            axes.set_xticklabels([])
    left = f" ({len(curves) - len(drawn)} with lower peaks are not drawn)" if len(curves) > len(drawn) else ""
    figure.suptitle(
        f"memory over a step, by owner{left}",
        y=1 - 0.1 / figure.get_size_inches()[1],
        va="top",
        fontsize=11,
        color=theme.ink,
    )
    axes.set_xlabel("milliseconds", color=theme.ink, fontsize=9)
    high = figure.get_size_inches()[1]
    figure.tight_layout(rect=(0, 0.42 / high, 1, 1 - 0.3 / high))
    _legend(figure, colours, theme, has_phases=any(curve.phases for curve in drawn))
    return save(figure, path)


def _place(owner: str) -> tuple[int, str]:
    return (OWNERS.index(owner) if owner in OWNERS else len(OWNERS), owner)


def _top(curve: MemoryCurve) -> float:
    """Return the height of a panel in GB, including space for the text above the peak."""
    most, device = curve.peak[1], curve.device_bytes or 0
    return 1.3 * (max(most, device) if most > _NEAR * device else most) / GB


def _draw(
    axes: Any, curve: MemoryCurve, colours: Mapping[str, str], theme: Theme, box: tuple[float, float, float]
) -> None:
    """Draw one panel; ``box`` has the first and last second of all panels, and their height in GB."""
    start, stop, top = box
    times = [(second - start) * 1e3 for second in (*curve.seconds, max(stop, curve.seconds[-1]))]
    stacks = [[held / GB for held in (*curve.owners[owner], curve.owners[owner][-1])] for owner in curve.ordered]
    axes.stackplot(
        times, stacks, step="post", colors=[colours[owner] for owner in curve.ordered], linewidth=0.0, alpha=0.9
    )
    at, most = (curve.peak[0] - start) * 1e3, curve.peak[1] / GB
    axes.plot([at], [most], marker="v", markersize=5, color=theme.ink)
    right = at < 0.5 * times[-1]
    said = format_bytes(curve.peak[1]) + (f": {_shortened(curve.peak_owner)}" if curve.peak_owner else "")
    axes.annotate(
        said,
        (at, most),
        textcoords="offset points",
        xytext=(6 if right else -6, 5),
        ha="left" if right else "right",
        fontsize=8,
        color=theme.ink,
    )
    title = curve.label
    if curve.device_bytes is not None:
        size = curve.device_bytes / GB
        title += f" · {most / size:.0%} of the {size:,.1f} GB of its GPU"
        if curve.fits is False:
            title += ", does not fit"
        if size < top:
            axes.axhline(size, color=theme.warning, linewidth=1.1, linestyle="--")
    axes.set_title(title, fontsize=9, loc="left", color=theme.warning if curve.fits is False else theme.ink)
    _draw_phases(axes, curve, theme, start, top)
    axes.set_xlim(0, (stop - start) * 1e3 or 1.0)
    axes.set_ylim(-0.06 * top if curve.phases else 0, top)
    axes.set_ylabel("GB", color=theme.ink, fontsize=8)
    axes.grid(visible=True, axis="y", color=theme.faint, linewidth=0.4)
    axes.set_axisbelow(True)


def _shortened(owner: str) -> str:
    """Return the owner, shortened in the middle if too long: ``"backward model.layers.…self_attention.query"``."""
    if len(owner) <= _MOST_CHARACTERS:
        return owner
    begin = _MOST_CHARACTERS // 3
    return f"{owner[:begin]}…{owner[begin + 1 - _MOST_CHARACTERS :]}"


def _draw_phases(axes: Any, curve: MemoryCurve, theme: Theme, start: float, top: float) -> None:
    """Draw a band below the curve: backward is strong, forward is weaker, and anything else is faint."""
    for begin, end, word in curve.phases:
        strength = {"forward": 0.35, "backward": 0.8}.get(word, 0.1)
        axes.broken_barh(
            [((begin - start) * 1e3, (end - begin) * 1e3)],
            (-0.06 * top, 0.045 * top),
            facecolor=(theme.ink, strength),
            edgecolor="none",
        )


def _legend(figure: Figure, colours: Mapping[str, str], theme: Theme, *, has_phases: bool) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, label=owner) for owner, colour in colours.items()]
    if has_phases:
        patches += [
            Patch(facecolor=(theme.ink, 0.35), label="forward"),
            Patch(facecolor=(theme.ink, 0.8), label="backward"),
            Patch(facecolor=(theme.ink, 0.1), label="update and others"),
        ]
    figure.legend(
        handles=patches, loc="lower center", ncol=len(patches), fontsize=8, frameon=False, labelcolor=theme.ink
    )


__all__ = ["OWNERS", "MemoryCurve", "save_memory_picture"]
