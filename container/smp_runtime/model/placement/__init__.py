"""Places a model on a rank by strategies, and reports the place of its parameters."""
