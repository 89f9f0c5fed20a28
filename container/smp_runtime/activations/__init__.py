"""Activation checkpointing and offloading: activations that are computed again, or wait in CPU memory, until backward."""
