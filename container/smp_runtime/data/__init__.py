"""Data read exactly once: an order of samples and a place in it that belong to the job, not to a rank."""
