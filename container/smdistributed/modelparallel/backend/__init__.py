"""Names that tools import from the library's backend."""
