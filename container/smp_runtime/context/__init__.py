"""Context parallelism: ranks of a context group hold slices of each sequence, and run any module on them.

A :class:`.ShardedSequence` has the shape of the whole sequence, so a model's own code runs unchanged; each rank computes on
its tokens. Operations without a rule gather the sequence first, so no operation is wrong for want of a rule.
"""
