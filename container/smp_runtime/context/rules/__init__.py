"""Rules by which operations compute on the slices of a sequence; importing this package registers them."""

from smp_runtime.context.rules import (  # noqa: F401 - each registers its rules
    attention,
    flexible,
    indexing,
    losses,
    metadata,
    pointwise,
    products,
    randomness,
    reductions,
    varlen,
    views,
    windows,
)
