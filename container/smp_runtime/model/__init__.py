"""``smp.DistributedModel``: the wrapper that a script touches, its parts, and the recipe that puts the strategies together."""
