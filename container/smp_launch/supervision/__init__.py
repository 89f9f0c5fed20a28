"""Keeps a job in sight until its end: its output, its waits, restarts after a failure."""
