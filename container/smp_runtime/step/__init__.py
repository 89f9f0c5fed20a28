"""``@smp.step``: a function that runs once per microbatch."""
