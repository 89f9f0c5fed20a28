"""Modules that no distributed class stands for, split in place: their plans, the proof of one, what changes on a module."""
