"""Executing: steps on one rank, module calls to other stages and from them."""
