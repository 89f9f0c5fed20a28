"""A model of what a real GPU shows beside results: cached memory, a memory limit, contexts, and launches per step."""
