"""Numbers that show where two trainings differ, whatever their tensors' layout, and guards against invalid numbers."""
