"""Formats of values in settings, files and messages: strict JSON, numbers, lists of ranks, secrets."""
