"""The colors of the ranks' computations, in every picture of a step."""

from __future__ import annotations

import colorsys

#: Lightness of a microbatch's colour, which differs between its forward and backward passes.
_LIGHTNESS = {"F": 0.62, "B": 0.40, "W": 0.26}
_SATURATION = 0.55
_STEP_FUNCTION = "#9b9b9b"

#: Neighbouring microbatches get hues far apart, and no two the same: the golden ratio never repeats.
_HUE_STEP = (5**0.5 - 1) / 2
_FIRST_HUE = 0.58


def colour_of(kind: str, microbatch: int) -> str:
    """Return a block's color as ``#rrggbb``.

    The hue depends on the microbatch. Forward is lightest, weight gradients are darkest. Other kinds are gray.
    """
    if kind not in _LIGHTNESS:
        return _STEP_FUNCTION
    hue = (_FIRST_HUE + microbatch * _HUE_STEP) % 1.0
    parts = colorsys.hls_to_rgb(hue, _LIGHTNESS[kind], _SATURATION)
    return "#" + "".join(f"{round(part * 255):02x}" for part in parts)
