"""The trackers, one in a file; each imports its package when it is made."""
