"""What the stages say to each other in a step whose course they know."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
from support.training.pipeline_training import messages_of_a_known_step


@pytest.mark.parametrize("stages", [2, 4])
def test_a_known_step_asks_for_nothing(ranks, stages):
    settings = {"partitions": stages, "microbatches": 4, "auto_partition": False, "default_partition": 0}
    counts = sum(
        (Counter(each) for each in ranks(messages_of_a_known_step, stages, 8, config=settings, timeout=120)), Counter()
    )
    counts.pop("NoneType", None)  # brings only news, which otherwise go with other messages
    once, each_microbatch = stages - 1, 4 * (stages - 1)
    # A value goes from each stage to the next one and home from the last, and so do the gradients.
    assert counts == {
        "Begin": once,
        "End": once,
        "ForwardCall": each_microbatch,
        "BackwardCall": each_microbatch,
        "ValueMessage": 2 * each_microbatch,
    }


def test_messages_are_the_same_after_their_way():
    import torch

    from smp_runtime.pipeline.transport import messages as protocol
    from smp_runtime.pipeline.transport.messages import (
        BackwardCall,
        Done,
        ForwardCall,
        Modes,
        Reply,
        TensorSlot,
        ValueMessage,
        from_plain,
        to_plain,
    )
    from smp_runtime.tensors.remote_tensor import TensorMetadata

    name = ("A", 1, (0, 2), 0)
    slots = (TensorSlot(name, 0, TensorMetadata((2, 3), torch.bfloat16, "cpu", True), True), None)
    modes = Modes(True, (("cpu", True, torch.bfloat16),))
    messages = [
        ForwardCall(
            1, (0, 2), "layers.1", b"head", True, slots, modes, b"\x01", 3, False, b"digest", ((0, 1),), (name,)
        ),
        BackwardCall(1, (0, 2), slots, True, True, True, None, (), ()),
        Reply("F", 1, (0, 2), b"head", slots, (True, False)),
        ValueMessage((name,)),
        Done("B", 1, (0, 2)),
    ]
    kinds = set(protocol._KINDS) - {type(message) for message in messages}
    messages += [kind(*range(len(kind._fields))) for kind in kinds]  # without slots or modes
    for message in messages:
        came = from_plain(pickle.loads(pickle.dumps(to_plain(message))))
        assert came == message
        assert type(came) is type(message)
        if "slots" in message._fields:
            assert type(came.slots[0]) is TensorSlot
            assert type(came.slots[0].meta) is TensorMetadata
