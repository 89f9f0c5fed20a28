"""Processes of ranks, and schedules of what they do."""
