"""Parts of a GPU's published peaks that kernels reach, by their kind."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class KernelRates:
    """Parts of a GPU's published peaks that kernels reach.

    Attributes:
        matrix: products in half precision, of the peak in half precision.
        matrix_float8: products in float8, of twice that peak.
        attention: of the peak in half precision.
        memory: of the memory's bandwidth.
        links: of the rate of NVLink, PCIe or the network, in collectives.
        uncertainty: the relative error of a step's time that is to be expected.
        uncertainty_of_context: the same if ranks share sequences out.
        sources: of the figures, in words.
    """

    matrix: float
    matrix_float8: float
    attention: float
    memory: float
    links: float
    uncertainty: float
    uncertainty_of_context: float
    sources: tuple[str, ...] = ()

    def slowed(self, part: float, memory: float = 1.0) -> KernelRates:
        """Return the rates of a GPU with a lower clock, because it may take less power, and with slower memory.

        Args:
            part: of the clock.
            memory: part of the bandwidth.
        """
        return replace(
            self,
            matrix=self.matrix * part,
            matrix_float8=self.matrix_float8 * part,
            attention=self.attention * part,
            memory=self.memory * memory,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the figures by name."""
        return asdict(self)
