"""Tensors in structures, tensors that are still elsewhere, and the calls that make them; no room of the runtime lies below."""
