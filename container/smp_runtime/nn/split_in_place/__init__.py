"""Replacements of modules in models that are split in place: same names and layout, a part on each rank."""
