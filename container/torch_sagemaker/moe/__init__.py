"""Names of mixtures of experts."""
