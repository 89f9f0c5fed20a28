"""Execution: steps on one rank, module calls to and from other stages."""
