"""Modules without a distributed class, split in place: their plans, the check of a plan, changes on a module."""
