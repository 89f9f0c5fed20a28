"""What full checkpoints hold: weights and the optimizer's state, by the names that one process gives them."""
