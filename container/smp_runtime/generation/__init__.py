"""``model.generate`` of a wrapped model: text from a model of which each rank has a part, as one process would write it."""
