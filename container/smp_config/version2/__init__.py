"""Configuration of version 2 of the library."""
