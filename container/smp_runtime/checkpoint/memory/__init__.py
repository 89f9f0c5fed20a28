"""The state of a training, copied between its steps into the shared memory of its host, for ranks that are started again."""
