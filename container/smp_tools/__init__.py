"""Tools that watch a training or stand in for one, above the engine: rehearsal, numerics, tracking."""
