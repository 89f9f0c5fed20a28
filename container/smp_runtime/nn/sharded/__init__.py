"""What takes the places of modules inside models that are split in place: their names and layout, a part on each rank."""
