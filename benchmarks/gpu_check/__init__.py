"""Checks of the library on one GPU: whether it starts, whether its numbers are right, and what it costs beside plain PyTorch.

``python benchmarks/gpu_check list`` names them. ``checks/`` has what each of them does, ``catalog.py`` their order and limits.
Without a GPU the same code runs on the CPU (``--tiny``).
"""
