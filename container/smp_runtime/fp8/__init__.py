"""Linear layers whose products are of numbers of 8 bits, with scales from earlier steps."""
