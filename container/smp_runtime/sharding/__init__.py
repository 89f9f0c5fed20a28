"""State that is shared out over the ranks that hold the same parameters, on flat units."""
