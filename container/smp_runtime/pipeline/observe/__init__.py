"""Observation: the timeline of a rank."""
