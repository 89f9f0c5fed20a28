"""Training on ranks and in one process, and the comparison of both."""
