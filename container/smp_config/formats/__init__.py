"""How values are written in settings, files and messages: strict JSON, numbers, lists of ranks, secrets."""
