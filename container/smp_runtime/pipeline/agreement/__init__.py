"""Agreement between pipelines that must run their work in one order, and leave a planned order together."""
