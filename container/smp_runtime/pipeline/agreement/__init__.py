"""How pipelines that must run their work in one order leave a planned order together."""
