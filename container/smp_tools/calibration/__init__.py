"""Measures the rates of a GPU's kernels and writes them as a rate card."""
