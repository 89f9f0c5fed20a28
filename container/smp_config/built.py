"""Which strategies the runtime of this version runs; read by the ranks, which refuse, and by the client, which warns."""

from __future__ import annotations

from smp_config.parameters import ModelParallelParameters


def unbuilt(parameters: ModelParallelParameters) -> list[str]:
    """The settings that ask for a strategy which this version has no runtime for, as ``name is value``."""
    asked = {
        "pipeline_parallel_degree": parameters.pipeline_parallel_degree > 1,
        "tensor_parallel_degree": parameters.tensor_parallel_degree > 1,
        "sharded_data_parallel_degree": parameters.sharded_data_parallel_degree > 1,
        "offload_activations": parameters.offload_activations,
    }
    return [f"{name} is {getattr(parameters, name)}" for name, wanted in asked.items() if wanted]
