"""Hugging Face models: their distributed forms, and the translation of their states."""
