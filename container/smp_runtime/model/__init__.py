"""``smp.DistributedModel``: the wrapper that a script uses, its parts, and the recipe that combines the strategies."""
