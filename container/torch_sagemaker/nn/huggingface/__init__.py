"""Modules for models of Transformers."""
