"""Faults that tests plant, and input that is wrong on purpose."""
