"""Mixtures of experts in version 2: routers that balance, and experts that expert parallel ranks share out."""
