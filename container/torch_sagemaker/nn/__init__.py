"""Modules that scripts put into their models."""
