"""Which strategies the runtime of this version runs; read by the ranks, which refuse, and by the client, which warns."""

from __future__ import annotations

from smp_config.parameters import ModelParallelParameters


def unbuilt(parameters: ModelParallelParameters) -> list[str]:
    """The settings that ask for a strategy which this version has no runtime for, as ``name is value``."""
    asked: dict[str, bool] = {}
    return [f"{name} is {getattr(parameters, name)}" for name, wanted in asked.items() if wanted]
