"""Parts of a GPU's published peaks that kernels reach, by their kind."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from smp_config import ConfigError

if TYPE_CHECKING:
    from smp_records.rate_card import RateCard


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
        uncertainty_of_async: the same with asynchronous tensor parallelism.
        uncertainty_elsewhere: the same on other GPUs than ``gpus``.
        gpus: on which the parts were measured; none: on the one that is planned.
        sources: of the figures, in words.
    """

    matrix: float
    matrix_float8: float
    attention: float
    memory: float
    links: float
    uncertainty: float
    uncertainty_of_context: float
    uncertainty_of_async: float = 0.0
    uncertainty_elsewhere: float = 0.0
    gpus: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @classmethod
    def of_card(cls, card: RateCard, otherwise: KernelRates, dtype: str, peak: float, memory: float) -> KernelRates:
        """Return the rates of a card, as parts of a GPU's published peaks.

        Args:
            otherwise: has what a card lacks: links, uncertainties, attention, and the rate of float8 beside half precision.
            dtype: of matrix products, ``"bfloat16"``.
            peak: operations per second that the GPU has at most in this type.
            memory: bytes per second that its memory has at most.

        Raises:
            ConfigError: the card has no rate for the type.
        """
        rate = card.flops_per_second.get(dtype)
        if rate is None:
            raise ConfigError(
                f"the rate card of {card.name} has no flops_per_second of {dtype}, in which the job multiplies matrices; add it, "
                "or leave the card out",
                code="SMP110",
            )
        matrix = rate * card.matrix_part / peak
        attention = otherwise.attention * matrix / otherwise.matrix
        if card.attention_part is not None:
            attention = card.attention_part * card.flops_per_second.get("bfloat16", rate) / peak
        return replace(
            otherwise,
            matrix=matrix,
            matrix_float8=otherwise.matrix_float8 * matrix / otherwise.matrix,
            attention=attention,
            memory=card.memory_bytes_per_second * card.memory_part / memory,
            gpus=(),
            sources=(f"the card of {card.name}", *card.sources[:1], "links and float8: as without it"),
        )

    def error(self, gpu: str, context: int, *, is_async: bool = False) -> float:
        """Return the relative error of a step's time that is to be expected.

        Args:
            gpu: that is planned.
            context: ranks that share a sequence out.
            is_async: tensor parallelism is asynchronous.
        """
        found = self.uncertainty if context == 1 else self.uncertainty_of_context
        if is_async:
            found = max(found, self.uncertainty_of_async)
        return max(found, self.uncertainty_elsewhere) if self.gpus and gpu not in self.gpus else found

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
