"""Trees taken apart and put together again."""

from __future__ import annotations

import threading
import types
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from smp_runtime.errors import SMPRuntimeError, SMPUserError
from smp_runtime.pipeline.transport.packing import pack, restore_into, unpack

Pair = namedtuple("Pair", "left right")


class Typed(NamedTuple):
    left: Any
    right: Any


@dataclass
class Record:
    tensor: Any
    name: str = "record"
    items: list = field(default_factory=list)


class Slotted:
    __slots__ = ("__private", "shown")

    def __init__(self, shown: Any, private: Any) -> None:
        self.shown = shown
        self.__private = private

    @property
    def private(self) -> Any:
        return self.__private


class Picky(torch.Tensor):
    """Stands for a handle: any operation on it is an error."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was called")

    __torch_dispatch__ = __torch_function__


def picky() -> Picky:
    return torch.Tensor._make_wrapper_subclass(Picky, (2, 3))


def importable_by_name() -> None:
    pass


def travel(tree: Any, **kwargs: Any) -> Any:
    packed = pack(tree, **kwargs)
    return unpack(packed.head, packed.tensors)


def test_a_call_comes_back_with_its_own_tensors():
    a, b = torch.ones(2), nn.Parameter(torch.zeros(3))
    call = ((a, [b, None, 3], Pair(a, "x")), {"mask": {"deep": (b, 1.5, b"bytes")}, "flag": True})
    packed = pack(call)
    assert [id(t) for t in packed.tensors] == [id(a), id(b)]
    args, kwargs = unpack(packed.head, packed.tensors)
    assert args[0] is a
    assert args[1][0] is b
    assert args[1][1:] == [None, 3]
    assert type(args[2]) is Pair
    assert args[2].left is a
    assert kwargs["mask"]["deep"][0] is b
    assert kwargs["mask"]["deep"][1:] == (1.5, b"bytes")
    assert kwargs["flag"] is True


def test_tensors_are_never_touched():
    handle = picky()
    packed = pack(((handle, {"again": handle}, {handle}), {}))
    assert len(packed.tensors) == 1
    assert packed.tensors[0] is handle
    args, _ = unpack(packed.head, ["stand-in"])
    assert args == ("stand-in", {"again": "stand-in"}, {"stand-in"})


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict(b=1, a=2),
        defaultdict(list, {"k": [1]}),
        deque([1, 2], maxlen=5),
        Typed(1, (2,)),
        Record(None, "n", [1]),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cpu"),
        torch.channels_last,
        torch.strided,
        torch.relu,
        nn.functional.gelu,
        importable_by_name,
        Record,
        slice(1, 2),
        range(3),
        frozenset({"a", "b"}),
        {1, "a", None},
        2**70,
        1 + 2j,
        ...,
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_types_survive(value):
    back = travel(value)
    assert type(back) is type(value)
    assert back == value


def test_model_outputs_survive():
    import transformers

    output = transformers.modeling_outputs.BaseModelOutputWithPast(
        last_hidden_state=torch.ones(2), past_key_values=None
    )
    back = travel(output)
    assert type(back) is type(output)
    assert back.last_hidden_state is output.last_hidden_state
    assert back["last_hidden_state"] is output.last_hidden_state
    assert list(back) == ["last_hidden_state"]


def cache(layers: int = 2, tokens: int = 3) -> Any:
    import transformers

    made = transformers.DynamicCache()
    for layer in range(layers):
        made.update(torch.rand(1, 2, tokens, 4), torch.rand(1, 2, tokens, 4), layer)
    return made


def test_the_tensors_inside_a_cache_are_taken_out():
    original = cache()
    packed = pack(((), {"past_key_values": original}))
    assert len(packed.tensors) == 4
    assert packed.mutable
    assert len(packed.head) < 2000
    _, kwargs = unpack(packed.head, packed.tensors)
    assert kwargs["past_key_values"].layers[1].values is original.layers[1].values
    assert kwargs["past_key_values"].get_seq_length() == 3


def spelled(word: str) -> str:
    """An equal string that is another object."""
    return "".join(list(word))


def structures() -> list[Any]:
    long = spelled("a rather long string")
    return [
        ((torch.ones(2), spelled("word"), spelled("word"), (long, long)), {spelled("key"): [1.5, spelled("word")]}),
        Record(torch.ones(1), spelled("record"), [Pair(1, (2, 3)), Pair(1, (2, 3))]),
        {spelled("s"): {spelled("x"), spelled("y"), spelled("z"), 4}, "f": frozenset({spelled("x"), "k", 2})},
        (torch.float16, torch.Size([1, 2]), torch.device("cpu"), importable_by_name),
    ]


@pytest.mark.parametrize("index", range(4))
def test_equal_structures_give_equal_bytes(index):
    one, two = structures()[index], structures()[index]
    assert pack(one).head == pack(two).head


def test_which_equal_objects_are_one_does_not_show_in_the_bytes():
    same, pair = spelled("word"), (1, "a")
    assert pack([same, same]).head == pack([spelled("word"), spelled("word")]).head
    assert pack([pair, pair]).head == pack([(1, "a"), (1, spelled("a"))]).head
    shared, other = [same], [spelled("word")]
    assert pack((shared, shared, same, same)).head == pack((other, other, spelled("word"), same)).head


def test_the_order_of_a_set_does_not_show_in_the_bytes():
    one, two = {*(0, 8)}, {*(8, 0)}  # they collide, so that the order of insertion stays
    assert list(one) != list(two)
    assert pack(one).head == pack(two).head
    assert pack(frozenset(one)).head == pack(frozenset(two)).head


def test_equal_caches_give_equal_bytes_and_longer_ones_too():
    assert pack(((), {"cache": cache()})).head == pack(((), {"cache": cache(tokens=5)})).head
    assert pack(cache(layers=2)).head != pack(cache(layers=3)).head


def test_different_structures_give_different_bytes():
    a, b = torch.ones(1), torch.ones(1)
    heads = [pack(t).head for t in ((a, a), (a, b), [a, b], (a, None), {"x": a}, {"y": a}, (a, 1), (a, True), (a, 1.0))]
    assert len(set(heads)) == len(heads)


def test_an_object_in_two_places_arrives_once():
    shared = [torch.ones(1)]
    loop: list[Any] = [shared]
    loop.append(loop)
    (first, second, circle), kwargs = travel(((shared, shared, loop), {"again": shared}))
    assert first is second is kwargs["again"] is circle[0]
    assert circle[1] is circle
    one, two = travel(([1], [1]))
    assert one is not two


def test_modules_of_the_model_travel_as_their_path():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    modules = {id(module): path for path, module in model.named_modules()}
    packed = pack(((model[0], model), {"act": model[1]}), modules=modules)
    assert packed.tensors == []
    args, kwargs = unpack(packed.head, [], module_of=model.get_submodule)
    assert args[0] is model[0]
    assert args[1] is model
    assert kwargs["act"] is model[1]


def test_a_module_of_the_script_travels_whole():
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    back = travel(loss)
    assert type(back) is nn.CrossEntropyLoss
    assert back is not loss
    assert back.weight is loss.weight


@pytest.mark.parametrize(
    ("tree", "mutable"),
    [
        (((torch.ones(1), 1, "a", None, (2, torch.ones(1))), {"a": torch.ones(1)}), False),
        (((torch.Size([1]), torch.float32, torch.device("cpu"), Pair(1, 2), frozenset({1}), len, Record), {}), False),
        ((([],), {}), True),
        (((), {"a": {}}), True),
        (((({"a": 1},),), {}), True),
        (((Record(None),), {}), True),
        (((Slotted(1, 2),), {}), True),
        (((set(),), {}), True),
        (((np.zeros(2),), {}), True),
        ([1], True),
        ({"a": 1}, True),
    ],
)
def test_what_a_callee_could_change_is_noticed(tree, mutable):
    assert pack(tree).mutable is mutable


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: lambda: None, "function"),
        (lambda: (i for i in range(3)), "generator"),
        (threading.Lock, "lock"),
        (lambda: open(__file__), "TextIOWrapper"),  # noqa: SIM115
        (lambda: types, "module"),
    ],
    ids=["lambda", "generator", "lock", "file", "module"],
)
@pytest.mark.parametrize(
    ("wrap", "where"),
    [
        (lambda bad: ((torch.ones(1), {"callback": bad, "fine": 1}), {}), 'args[1]["callback"]'),
        (lambda bad: ((), {"hook": [1, (2, bad)]}), 'kwargs["hook"][1][1]'),
        (lambda bad: ((Record(None, "n", [bad]),), {}), "args[0].items[0]"),
        (lambda bad: ((Pair(1, bad), Slotted(1, 2)), {}), "args[0].right"),
        (lambda bad: (([0], Slotted(bad, 2)), {}), "args[1].shown"),
        (lambda bad: {"loss": bad}, 'the value["loss"]'),
    ],
)
def test_what_cannot_travel_is_named(make, kind, wrap, where):
    with pytest.raises(SMPUserError) as caught:
        pack(wrap(make()))
    message = str(caught.value)
    assert message.startswith(f"{where} is a ")
    assert kind in message.split(",")[0]
    assert "pass data instead" in message
    assert "smp.set_partition" in message


def test_a_class_that_is_missing_here_is_an_error_that_says_so():
    head = pack(Record(None)).head.replace(b"Record", b"Rekord")
    with pytest.raises(SMPRuntimeError, match="importable on every rank"):
        unpack(head, [])


def test_containers_are_restored_in_place():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    items, inner, chosen, row = [a, 1], {"x": a, "gone": 1}, {1}, deque([1])
    original = ((items, (inner, [a])), {"chosen": chosen, "row": row, "buffer": (buffer := bytearray(b"ab"))})
    kept = original[0][1][1]
    (new_items, (new_inner, new_list)), new_kwargs = changed = travel(original)
    new_items[1:] = [b, {"new": c}]
    del new_inner["gone"]
    new_inner["y"] = b
    new_list.clear()
    new_kwargs["chosen"].add(2)
    new_kwargs["row"].append(2)
    new_kwargs["buffer"].extend(b"c")
    restore_into(original, changed)
    assert items[0] is a
    assert items[1] is b
    assert items[2] == {"new": c}
    assert list(inner) == ["x", "y"]
    assert inner["y"] is b
    assert kept == []
    assert chosen == {1, 2}
    assert list(row) == [1, 2]
    assert buffer == b"abc"


def test_objects_are_restored_in_place():
    record, slotted, array = Record(torch.ones(1), "old", [1]), Slotted([1], [2]), np.zeros(2)
    items, private = record.items, slotted.private
    original = ((record, slotted, array), {})
    changed = travel(original)
    new = changed[0]
    new[0].name = "new"
    new[0].items.append(2)
    new[0].extra = "more"
    new[1].private.append(3)
    new[2][0] = 7
    restore_into(original, changed)
    assert (record.name, record.items, record.extra) == ("new", [1, 2], "more")
    assert record.items is items == [1, 2]
    assert slotted.private is private == [2, 3]
    assert array.tolist() == [7, 0]


def test_the_callers_own_cache_grows():
    mine = cache(layers=1)
    layer, before = mine.layers[0], mine.layers[0].values
    original = ((torch.ones(1),), {"past_key_values": mine})
    changed = travel(original)
    theirs = changed[1]["past_key_values"]
    theirs.update(torch.rand(1, 2, 1, 4), torch.rand(1, 2, 1, 4), 0)
    theirs.update(torch.rand(1, 2, 4, 4), torch.rand(1, 2, 4, 4), 1)
    restore_into(original, changed)
    assert mine.get_seq_length() == 4
    assert len(mine.layers) == 2
    assert mine.layers[0] is layer
    assert layer.keys is theirs.layers[0].keys
    assert torch.equal(layer.values[:, :, :3], before)


def test_an_encoder_decoder_cache_and_a_model_output_are_restored():
    import transformers

    mine = transformers.EncoderDecoderCache(cache(1), transformers.DynamicCache())
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.ones(1))
    self_attention, new = mine.self_attention_cache, torch.zeros(2)
    original = ((mine, output), {})
    changed = travel(original)
    changed[0][0].cross_attention_cache.update(torch.rand(1, 2, 4, 4), torch.rand(1, 2, 4, 4), 0)
    changed[0][0].is_updated[0] = True
    changed[0][1].last_hidden_state = new
    restore_into(original, changed)
    assert mine.self_attention_cache is self_attention
    assert mine.cross_attention_cache.get_seq_length() == 4
    assert mine.is_updated == {0: True}
    assert output.last_hidden_state is new
    assert output["last_hidden_state"] is new


def test_what_is_unchanged_stays_what_it_was():
    handle = picky()
    inner = ([handle],)
    original = ((inner, {"a": inner}), {"t": handle})
    before = [original[0][1]["a"], inner[0]]
    restore_into(original, travel(original))
    assert original[0][1]["a"] is before[0]
    assert inner[0] is before[1]
    assert inner[0][0] is handle


def test_restoring_ends_for_objects_that_hold_themselves():
    loop: list[Any] = [1]
    loop.append(loop)
    changed = travel((loop,))
    changed[0].append(2)
    restore_into((loop,), changed)
    assert loop[0] == 1
    assert loop[1] is loop
    assert loop[2] == 2


class Keeper:
    """Leaves something out of its pickle."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0

    def __getstate__(self):
        return {"count": self.count}


def test_what_a_class_does_not_pickle_stays_with_the_caller():
    keeper = Keeper()
    lock = keeper.lock
    changed = travel(((keeper,), {}))
    changed[0][0].count = 5
    restore_into(((keeper,), {}), changed)
    assert keeper.count == 5
    assert keeper.lock is lock


@pytest.mark.parametrize("count", [0, 1, 2, 5])  # the last one is pickled
def test_common_trees_need_no_pickling_and_have_the_same_head(count):
    from smp_runtime.pipeline.transport import packing as wire

    tensors = [torch.ones(1) for _ in range(max(count, 1))]
    tree = (tuple(tensors), {}) if count else (tensors[0], None)
    quick = pack(tree)
    slow = wire._packed(tree, {}, tree[1], shared=False)
    assert (quick.head, quick.mutable) == (slow.head, slow.mutable)
    assert all(a is b for a, b in zip(quick.tensors, slow.tensors, strict=True))
    other = torch.zeros(2)
    came, pickled = unpack(quick.head, [other] * len(tensors)), ((other,) * count, {}) if count else (other, None)
    assert came[1] == pickled[1]
    assert len(came[0]) == len(pickled[0])
    assert all(a is b for a, b in zip(came[0] if count else [came[0]], [other] * len(tensors), strict=True))


def test_a_tensor_that_is_given_twice_arrives_once():
    tensor = torch.ones(1)
    packed = pack(((tensor, tensor), {}))
    assert len(packed.tensors) == 1
    (first, second), _ = unpack(packed.head, packed.tensors)
    assert first is second
