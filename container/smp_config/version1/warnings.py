"""Warnings about settings that are allowed but ignored or not recommended."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from smp_config.schedules import TRAITS

#: Settings that only matter when ``sharded_data_parallel_degree`` is above 1.
SHARDING_OPTIONS = (
    "sdp_reduce_bucket_size",
    "sdp_param_persistence_threshold",
    "sdp_max_live_parameters",
    "sdp_hierarchical_allgather",
    "sdp_gradient_clipping",
)


def find_warnings(parameters: Any) -> list[str]:
    """Return warnings of ``ModelParallelParameters`` that are allowed but ignored or not recommended, one sentence each."""
    found = []
    given = parameters.model_fields_set
    tensor = parameters.tensor_parallel_degree
    if tensor & (tensor - 1):
        example = 1 << tensor.bit_length() - 1
        found.append(f"tensor_parallel_degree is {tensor}; powers of two are recommended, for example {example}")
    if parameters.sharded_data_parallel_degree == 1:
        found += _of_sharding(given)
    has_default = "default_partition" in given and parameters.default_partition
    if has_default and parameters.auto_partition:
        found.append(f"default_partition={parameters.default_partition} ignored: auto_partition is true")
    found += _of_pieces(parameters)
    found += _of_microbatches(parameters)
    if "activation_loading_horizon" in given and not parameters.offload_activations:
        found.append("activation_loading_horizon ignored: offload_activations is false")
    if "context_parallel" in given and parameters.context_parallel_degree == 1:
        found.append(f"context_parallel={parameters.context_parallel!r} ignored: context_parallel_degree is 1")
    if parameters.prescaled_batch and tensor == 1:
        found.append("prescaled_batch ignored: tensor_parallel_degree is 1")
    found += _of_programs(parameters)
    return found + _of_compiling(parameters) + _without_effect(parameters)


def _of_sharding(given: Container[str]) -> list[str]:
    """Return a warning of the settings of sharding that a job without sharding was given."""
    ignored = [name for name in SHARDING_OPTIONS if name in given]
    if not ignored:
        return []
    return [f"{', '.join(ignored)} ignored: sharded_data_parallel_degree is 1, so nothing is sharded"]


def _of_programs(parameters: Any) -> list[str]:
    if not parameters.step_program:
        return []
    if parameters.pipeline_parallel_degree == 1:
        return ["step_program ignored: pipeline_parallel_degree is 1"]
    if not parameters.fast_mode:
        return ["step_program ignored: fast_mode is false, so every call waits for its result"]
    return []


def _of_microbatches(parameters: Any) -> list[str]:
    found = []
    is_sharded = parameters.sharded_data_parallel_degree > 1
    if parameters.offload_activations and parameters.microbatches == 1 and not is_sharded:
        found.append("offload_activations hides its transfers only behind other microbatches, but microbatches is 1")
    active = parameters.active_microbatches or 0
    if "active_microbatches" in parameters.model_fields_set and active > parameters.microbatches:
        found.append(
            f"active_microbatches is {active}, but microbatches is {parameters.microbatches}, the most that can be "
            "in flight: it counts as that"
        )
    return found


def _of_pieces(parameters: Any) -> list[str]:
    """Return warnings of settings for stages with several pieces that have no effect."""
    if parameters.virtual_stages == 1:
        return []
    if parameters.pipeline_parallel_degree == 1 or not parameters.auto_partition:
        why = "auto_partition is false" if parameters.pipeline_parallel_degree > 1 else "pipeline_parallel_degree is 1"
        return [f"virtual_stages={parameters.virtual_stages} ignored: {why}"]
    if TRAITS[parameters.pipeline].splits_backward:
        return [
            f"stages wait no less with {parameters.pipeline} and virtual_stages than with virtual_stages alone: use one of them"
        ]
    return []


def _of_compiling(parameters: Any) -> list[str]:
    """Return warnings of compiler settings that have no effect."""
    said = []
    if parameters.compile and TRAITS[parameters.pipeline].splits_backward:
        said.append(
            f"{parameters.pipeline} computes the gradients of compiled blocks whole: only what is not compiled can come later"
        )
    if "compile_backend" in parameters.model_fields_set and not parameters.compile:
        said.append("compile_backend ignored: compile is false")
    return said


def _without_effect(parameters: Any) -> list[str]:
    """Return warnings of old scripts' settings that have no effect here, or another than they expect."""
    said = []
    if not parameters.contiguous:
        said.append(
            "contiguous is false, which changes nothing: the automatic partition gives every stage neighbouring modules; to "
            "place modules otherwise, call smp.set_partition, or use smp.partition with auto_partition false"
        )
    if parameters.static_mode:
        said.append("static_mode ignored: the order of the first steps is planned and replayed in any case; remove it")
    if parameters.match_weights:
        said.append(
            "_match_weights ignored: modules that are distributed take over the original's weights in any case; remove it"
        )
    if not parameters.fast_mode and parameters.pipeline_parallel_degree > 1:
        said.append(
            "fast_mode is false, so every call of a module on another stage waits for its result: remove it, unless the "
            "shapes of a module's outputs depend on the values of its inputs"
        )
    return said
