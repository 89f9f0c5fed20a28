"""Small functions that scripts call."""
