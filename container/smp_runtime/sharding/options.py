"""The ``sdp_*`` settings, as the engine reads them."""

from __future__ import annotations

from dataclasses import dataclass

from smp_config import ModelParallelParameters


@dataclass(frozen=True)
class ShardingOptions:
    """What sharded data parallelism was asked for; all sizes count elements.

    Attributes:
        bucket_elements: most gradient elements that one collective carries.
        persistence_threshold: parameters with fewer elements stay whole on every rank; 0 shards all.
        max_live: most elements of gathered parameters at any time.
        hierarchical: gather in phases between and inside hosts, where a sharding group spans several.
        clipping: L2 norm to which the whole gradient is scaled down before each update.
    """

    bucket_elements: int
    persistence_threshold: int
    max_live: int
    hierarchical: bool
    clipping: float

    @classmethod
    def of(cls, parameters: ModelParallelParameters) -> ShardingOptions:
        """The options of a configuration."""
        return cls(
            bucket_elements=parameters.sdp_reduce_bucket_size,
            persistence_threshold=parameters.sdp_param_persistence_threshold,
            max_live=parameters.sdp_max_live_parameters,
            hierarchical=parameters.sdp_hierarchical_allgather,
            clipping=parameters.sdp_gradient_clipping,
        )
