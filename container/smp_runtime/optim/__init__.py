"""``smp.DistributedOptimizer``, what it updates, clips and scales, and its state."""
