"""The names of ``transformer_engine.common.recipe``: formats, and how scales follow from the greatest values of earlier steps."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from smp_config.errors import kind_of
from smp_runtime.errors import SMPUserError

if TYPE_CHECKING:
    import torch

#: Longest history that a recipe may ask for; one entry is three numbers for each layer.
_LONGEST = 2**20


class _FormatMaxima(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """The formats of a recipe: the greatest number of the forward pass, and that of gradients.

    Attributes:
        E4M3: 4 bits of exponent and 3 of mantissa, for everything.
        E5M2: 5 and 2; for gradients, inside ``HYBRID`` only.
        HYBRID: E4M3 in the forward pass, E5M2 for gradients.
    """

    E4M3 = _FormatMaxima(448.0, 448.0)
    E5M2 = _FormatMaxima(57344.0, 57344.0)
    HYBRID = _FormatMaxima(448.0, 57344.0)


@dataclass(frozen=True)
class DelayedScaling:
    """A recipe of scaling by the greatest absolute values (amax) of earlier steps.

    Args:
        margin: binary digits that are left free above the greatest value.
        fp8_format: a :class:`Format`.
        amax_history_len: steps whose greatest values count.
        amax_compute_algo: ``"max"`` of the history, its ``"most_recent"`` value, or a function of the history
            ``[amax_history_len, tensors]`` that returns one value per tensor.
        scaling_factor_compute_algo: a function of ``(amax, scale, fp8_max, recipe)`` that returns the scale; None for
            ``fp8_max / amax / 2**margin``.
        reduce_amax: take the greatest values of all ranks of the group.
        fp8_dpa: only False: attention scores are computed in the model's type.
        fp8_mha: only False, as above.
        interval: only 1: scales change with every step.

    Raises:
        SMPUserError: a value that is none of these.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[torch.Tensor], torch.Tensor] = "max"
    scaling_factor_compute_algo: Callable[..., torch.Tensor] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    override_linear_precision: Any = (False, False, False)
    interval: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.fp8_format, Format) or self.fp8_format is Format.E5M2:
            raise SMPUserError(
                f"fp8_format is {self.fp8_format}; use Format.HYBRID or Format.E4M3: weights need the mantissa of E4M3",
                code="SMP321",
            )
        _require_number("margin", self.margin, 0, 32)
        _require_number("amax_history_len", self.amax_history_len, 1, _LONGEST)
        if self.interval != 1:
            raise SMPUserError(
                f"interval is {self.interval!r}; leave it out: scales change with every step", code="SMP321"
            )
        algorithm = self.amax_compute_algo
        if not callable(algorithm) and algorithm not in ("max", "most_recent"):
            raise SMPUserError(
                f"amax_compute_algo is {algorithm!r}; use 'max', 'most_recent' or a function", code="SMP321"
            )
        if self.fp8_dpa or self.fp8_mha or any(self.override_linear_precision):
            raise SMPUserError(
                "fp8_dpa, fp8_mha or override_linear_precision is true, and emulated FP8 is for products of linear layers, all "
                "three of each: leave them out, or install transformer_engine",
                code="SMP321",
            )


def _require_number(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise SMPUserError(
            f"{name} is {value!r}, {kind_of(value)}; use a whole number from {least} to {most}", code="SMP321"
        )
