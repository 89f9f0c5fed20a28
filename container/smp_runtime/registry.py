"""The parameter registry: every parameter's global name, shape and aliases, read by all that walk over the state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from smp_runtime.errors import SMPUserError


@dataclass(frozen=True)
class ParameterRecord:
    """One parameter (not one name: tied names share a record).

    Attributes:
        name: its first global name, as in the unwrapped module.
        shape: global shape.
        aliases: its other names.
        parameter: the tensor on this rank.
    """

    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...]
    parameter: nn.Parameter

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


class ParameterRegistry:
    """All parameters of a module, each once."""

    def __init__(self, module: nn.Module) -> None:
        names: dict[int, list[str]] = {}
        parameters: dict[int, nn.Parameter] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            parameters[id(parameter)] = parameter
        self._records = [
            ParameterRecord(found[0], tuple(parameters[key].shape), tuple(found[1:]), parameters[key])
            for key, found in names.items()
        ]
        self._by_parameter = {id(record.parameter): record for record in self._records}

    def __iter__(self) -> Iterator[ParameterRecord]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def record_of(self, parameter: torch.Tensor) -> ParameterRecord:
        """The record of a parameter of this model.

        Raises:
            SMPUserError: it is not one.
        """
        record = self._by_parameter.get(id(parameter))
        if record is None:
            raise SMPUserError(
                f"a tensor of shape {list(parameter.shape)} is not a parameter of the wrapped model; create the "
                "optimizer from the parameters of the model that smp.DistributedModel wraps"
            )
        return record

    @property
    def elements(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return sum(record.parameter.numel() for record in self._records)
