"""Tensors in structures, tensors that are still elsewhere, and the calls that make them; no other package is below."""
