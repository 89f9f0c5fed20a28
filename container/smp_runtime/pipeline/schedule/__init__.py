"""Scheduling: the actions of a stage as data, simulated and planned without processes."""
