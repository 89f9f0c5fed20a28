"""Full checkpoints: weights and the optimizer's state, by the names that they have in one process."""
