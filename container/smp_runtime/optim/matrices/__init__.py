"""Optimizers that update whole matrices, of which ranks have parts."""
