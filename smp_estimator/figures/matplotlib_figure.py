"""Shared parts of all pictures: a light or dark matplotlib figure, and its file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_config import ConfigError
from smp_config.errors import PackageMissing
from smp_config.machine.extras import install_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Dots per inch of a picture in dots.
_DPI = 120


@dataclass(frozen=True)
class Theme:
    """Colours of a picture, as ``#rrggbb``.

    Attributes:
        background: of the page and of what is drawn on it.
        ink: texts and lines.
        faint: lines that help the eye.
        warning: what must be seen first.
    """

    background: str
    ink: str
    faint: str
    warning: str


LIGHT = Theme(background="#ffffff", ink="#1f2328", faint="#d0d7de", warning="#b3261e")
DARK = Theme(background="#0d1117", ink="#e6edf3", faint="#3d444d", warning="#ff7b72")


def figure_for(path: str | Path, width: float, height: float, theme: Theme = LIGHT) -> Figure:
    """Create an empty figure with a width and a height in inches.

    Args:
        path: file that the figure will be saved to; its ending sets the format (``.png``, ``.svg``, ``.pdf``).

    Raises:
        ConfigError: matplotlib does not know the format.
        PackageMissing: matplotlib is not installed.
    """
    try:
        # No pyplot: its global state and its choice of a screen are not needed for a file.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PackageMissing(
            f"drawing needs matplotlib ({error}); {install_command('plots')}, or write --trace FILE.json"
        ) from None
    figure = Figure(figsize=(width, height), dpi=_DPI, facecolor=theme.background)
    canvas = FigureCanvasAgg(figure)
    target = Path(path)
    if target.suffix[1:].lower() not in canvas.get_supported_filetypes():
        raise ConfigError(
            f"the picture {target} ends with {target.suffix!r}; the ending says the format: use .png, .svg or .pdf",
            code="SMP116",
        )
    return figure


def colour_axes(axes: Any, theme: Theme) -> Any:
    """Apply a theme's colors to axes and return them. Titles and labels that are added later need their own colors."""
    axes.set_facecolor(theme.background)
    axes.tick_params(colors=theme.ink, labelsize=8)
    for spine in axes.spines.values():
        spine.set_color(theme.faint)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.xaxis.label.set_color(theme.ink)
    axes.yaxis.label.set_color(theme.ink)
    axes.title.set_color(theme.ink)
    return axes


def save(figure: Figure, path: str | Path) -> Path:
    """Save the figure and return its path; raises OSError if the folder cannot be written to."""
    target = Path(path)
    figure.savefig(target, bbox_inches="tight", facecolor=figure.get_facecolor())
    return target
