"""The strategies that place a model on a rank, and the report of where its parameters lie."""
