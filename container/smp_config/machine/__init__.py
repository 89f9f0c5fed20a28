"""Machines: instance types and GPUs of the catalogue, this host, and the launchers that start ranks on it."""
