"""A first script and a first notebook, made from a few answers."""
