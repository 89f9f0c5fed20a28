"""Seeing: the timeline of a rank."""
