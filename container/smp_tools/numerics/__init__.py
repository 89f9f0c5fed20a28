"""Numbers that tell two trainings apart wherever their tensors lie, and guards against those that should not come."""
