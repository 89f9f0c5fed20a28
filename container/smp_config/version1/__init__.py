"""What only version 1 of the library has."""
