"""What a save is made of: the reports of ranks, and what stays the same from save to save."""
