"""Which modules are distributed by tensor parallelism, and what stands in their place."""
