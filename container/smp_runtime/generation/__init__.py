"""``model.generate`` of a wrapped model: the text of one process, although each rank has only a part."""
