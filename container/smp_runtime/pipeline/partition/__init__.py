"""Partitioning: what a model does, what it costs, and where it is cut."""
