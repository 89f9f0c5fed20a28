"""Saving and loading: files that are whole or absent, folders that are complete or not the newest."""
