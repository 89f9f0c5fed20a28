"""Differences between two trainings, from the numbers that their ranks have recorded."""
