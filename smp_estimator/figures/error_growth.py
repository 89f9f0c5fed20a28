"""How the error of two trainings grows, as a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from smp_estimator.figures.matplotlib_figure import LIGHT, Theme, colour_axes, figure_for, save
from smp_records.numerics import PHASES

if TYPE_CHECKING:
    from smp_estimator.numerics.comparison import Comparison

#: Smaller errors are drawn at the floor, greater ones at the ceiling.
_FLOOR, _CEILING = 1e-17, 2.0


def save_picture(found: Comparison, path: str, theme: Theme = LIGHT) -> Path:
    """Draw every tensor's error in causal order next to the error that rounding explains.

    The ending of ``path`` sets the format.

    Raises:
        ConfigError: matplotlib does not know the format.
        PackageMissing: matplotlib is not installed.
    """
    figure = figure_for(path, 12.0, 5.0, theme)
    axes = colour_axes(figure.add_subplot(), theme)
    shown = [each for each in found.compared if math.isfinite(each.allowed)]
    for number, phase in enumerate(PHASES):
        points = [(at, each) for at, each in enumerate(shown) if each.key.phase == phase]
        if points:
            errors = [min(max(each.error, _FLOOR), _CEILING) for _, each in points]
            axes.plot([at for at, _ in points], errors, ".", markersize=4, color=f"C{number}", label=phase)
    axes.plot(
        range(len(shown)),
        [max(each.allowed, _FLOOR) for each in shown],
        linewidth=0.6,
        color=theme.ink,
        alpha=0.6,
        label="explained by rounding",
    )
    first = found.first
    if first is not None and first in shown:
        at = shown.index(first)
        axes.axvline(at, color=theme.warning, linewidth=0.8)
        right = at > len(shown) / 2
        axes.annotate(
            f"first: {first.where}",
            (at, 3.0),
            xytext=(-4 if right else 4, 0),
            textcoords="offset points",
            color=theme.warning,
            fontsize=8,
            ha="right" if right else "left",
        )
    starts = {each.step: at for at, each in reversed(list(enumerate(shown)))}
    axes.set_xticks(list(starts.values()), [f"step {step}" for step in starts], fontsize=8)
    axes.set_yscale("log")
    axes.set_ylim(_FLOOR / 3, 10)
    axes.set_ylabel("relative error", color=theme.ink)
    axes.set_xlabel("tensors in the order in which one makes the next", color=theme.ink)
    axes.set_title(f"{found.one.name} and {found.other.name}", fontsize=10, color=theme.ink)
    axes.grid(visible=True, axis="x", linewidth=0.3, color=theme.faint)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.12),
        ncol=5,
        fontsize=8,
        frameon=False,
        labelcolor=theme.ink,
    )
    return save(figure, path)
