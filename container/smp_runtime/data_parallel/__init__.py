"""Replication over data parallel ranks: equal at the start, gradients averaged once per optimizer step."""
