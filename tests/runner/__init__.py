"""Runs all tests in all environments, in slices, and keeps one table of their outcomes."""
