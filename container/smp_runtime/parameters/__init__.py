"""Parameters: their global names and places, their precision, late creation, and what is updated instead of them."""
