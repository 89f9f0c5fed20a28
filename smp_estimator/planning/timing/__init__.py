"""Seconds in a plan: of kernels by their kind, and of a training with failures."""
