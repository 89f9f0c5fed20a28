"""Caches of keys and values that a model hands to checkpointed layers.

A cache keeps what a layer adds in its forward pass. Backward runs the layer again, which would then find its own keys and values,
and attend to each token twice: gradients are wrong, and often without an error. So checkpointed layers get no cache.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from smp_runtime.activations.region_buffers import modules_of
from smp_runtime.errors import SMPUserError

logger = logging.getLogger("smp")


def without_caches(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], label: str = ""
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a function that backward runs again, with None for each cache.

    Args:
        function: a module, or a function that is bound to modules, which tell their layers in the cache.
        label: for messages; empty for the type of ``function``.

    Raises:
        SMPUserError: a cache has tokens already, which the layer needs.
    """
    caches = [value for value in (*args, *kwargs.values()) if is_cache(value)]
    if not caches:
        return args, kwargs
    layers = sorted(_find_layers(function))
    name = label or type(function).__name__
    for cache in caches:
        if _is_filled(cache, layers):
            raise SMPUserError(
                f"the checkpointed {name} got a {type(cache).__name__} that has tokens already, and backward, which runs it again, "
                "would add them a second time: call the model with use_cache=False, or do not checkpoint it",
                code="SMP309",
            )
    _report(name, type(caches[0]).__name__)
    left = {key: None if is_cache(value) else value for key, value in kwargs.items()}
    return tuple(None if is_cache(value) else value for value in args), left


def is_cache(value: Any) -> bool:
    """Return whether a value is a cache of Transformers, whose classes of caches have this word in their names."""
    kinds = type(value).__mro__
    return any("Cache" in kind.__name__ and kind.__module__.startswith("transformers.") for kind in kinds)


@functools.cache  # once
def _report(name: str, kind: str) -> None:
    logger.warning(
        "the checkpointed %s gets no %s, since backward runs it again and would fill it twice: results have an empty cache; call "
        "the model with use_cache=False while it trains",
        *(name, kind),
    )


def _is_filled(cache: Any, layers: list[int]) -> bool:
    """Return whether a cache has tokens of these layers, or of any if none is given."""
    if not layers:
        known = getattr(cache, "layers", None) or (0,)
        layers = list(range(len(known)))
    for layer in layers:
        try:
            if _has_tokens(cache, layer):
                return True
        except (ValueError, IndexError, TypeError, AttributeError):
            continue  # a cache that has no such layer
    return getattr(cache, "has_previous_state", None) is True


def _has_tokens(cache: Any, layer: int) -> bool:
    count = getattr(cache, "get_seq_length", None)
    if count is not None and int(count(layer)) > 0:
        return True
    # Caches of state space models have no tokens, but a state.
    state = getattr(cache, "has_previous_state", None)
    return callable(state) and bool(state(layer))


def _find_layers(function: Any) -> set[int]:
    """Return the numbers by which the modules of a function find their entries in a cache."""
    numbers = (getattr(module, "layer_idx", None) for module in modules_of(function))
    return {number for number in numbers if isinstance(number, int)}
