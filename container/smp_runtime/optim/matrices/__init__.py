"""Optimizers that update whole matrices, although a rank has only a part of each."""
