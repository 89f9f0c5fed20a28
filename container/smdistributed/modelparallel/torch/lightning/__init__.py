"""Strategies for Lightning; its packages are imported only with the modules of this folder."""
