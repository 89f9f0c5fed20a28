"""A case of version 2 of the library: what is combined, drawn from a seed, and the settings of the job that it is."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from crossings.case import STEPS, Event, balanced
from crossings.version2_nets import VERSION2_NETS

#: Ranks, and the degrees of hybrid sharding, tensor and expert parallelism.
TOPOLOGIES: dict[str, tuple[int, int, int, int]] = {
    "one": (1, 0, 1, 1),
    "script2": (2, 0, 1, 1),
    "n2": (2, 1, 1, 1),
    "s2": (2, 2, 1, 1),
    "tp2": (2, 0, 2, 1),
    "ep2": (2, 0, 1, 2),
    "script4": (4, 0, 1, 1),
    "s4": (4, 4, 1, 1),
    "s2-dp2": (4, 2, 1, 1),
    "tp2-s2": (4, 2, 2, 1),
    "tp2-dp2": (4, 1, 2, 1),
    "tp4": (4, 0, 4, 1),
    "ep2-s2": (4, 2, 1, 2),
    "ep2-dp2": (4, 1, 1, 2),
    "ep4": (4, 0, 1, 4),
    "tp2-ep2": (4, 0, 2, 2),
}

#: Of each axis the plain value first: shrinking goes there.
AXES: dict[str, tuple[Any, ...]] = {
    "topology": tuple(TOPOLOGIES),
    "shards_by": ("wrapper", "function"),
    "units": ("root", "blocks", "layers"),
    "strategy": ("script", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"),
    "joined": (False, True),
    "precision": ("float64", "float32", "autocast", "bf16"),
    "checkpointing": ("none", "each", "some", "reentrant", "offload"),
    "own_offloading": (True, False),
    "horizon": (2, 1, 3),
    "delayed": ("none", "meta", "rank0"),
    "optimizer": ("sgd", "momentum", "adam", "adamw", "adagrad", "rmsprop", "muon"),
    "clipping": ("none", "library", "own"),
    "passes": (1, 2),
    "without_sync": (False, True),
    "grouped": (False, True),
    "zeroes": (False, True),
    "begins_frozen": (False, True),
    "packed": (False, True),
    "use": ("once", "twice", "teacher"),
    "net": tuple(VERSION2_NETS),
}

#: What happens between two steps; ``resume…`` may go to another topology of as many ranks.
EVENTS = (
    "evaluate",
    "evaluate_within",
    "double_batch",
    "shorten_samples",
    "resume_full",
    "resume_sharded",
    "resume_async",
    "resume_local",
    "reload_state",
    "change_weights",
    "summon_weights",
    "scale_gradients",
    "scale_clipped",
    "leave_pass_out",
    "lower_rate",
    "drop_gradients",
    "fail",
    "write_buffers",
)

#: Those that many cases cannot have, and the others have instead.
_SELDOM = ("resume_local", "leave_pass_out", "evaluate_within", "summon_weights")
#: Models that :class:`DelayedParamIniter` creates without the script's help.
_DRAWN_LATE = ("perceptron", "skips", "recurrent", "gpt2", "llama", "vit", "mixtral", "neox")
#: Mixtures of experts that ranks can share out.
_MIXTURES = ("listed", "tabled", "mixtral")
#: Optimizers that are well conditioned where gradients are rounded.
_ROUNDABLE = ("sgd", "momentum")
#: Models whose forward pass changes buffers.
_CHANGING = ("images", "averaging", "normed")


@dataclass(frozen=True)
class Version2Case:
    """One combination; the fields but the last are those of :data:`AXES`."""

    topology: str = "one"
    shards_by: str = "wrapper"
    units: str = "root"
    strategy: str = "script"
    joined: bool = False
    precision: str = "float64"
    checkpointing: str = "none"
    own_offloading: bool = True
    horizon: int = 2
    delayed: str = "none"
    optimizer: str = "sgd"
    clipping: str = "none"
    passes: int = 1
    without_sync: bool = False
    grouped: bool = False
    zeroes: bool = False
    begins_frozen: bool = False
    packed: bool = False
    use: str = "once"
    net: str = "perceptron"
    events: tuple[Event, ...] = ()

    #: What trainings of version 1 have besides.
    microbatches: ClassVar[int] = 1
    hooked: ClassVar[bool] = False
    later_group: ClassVar[bool] = False
    steps: ClassVar[int] = STEPS
    is_half: ClassVar[bool] = False

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return TOPOLOGIES[self.topology][0]

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters that the script makes."""
        return torch.float64 if self.precision == "float64" else torch.float32

    @property
    def is_rounded(self) -> bool:
        """Return whether the job computes in half precision."""
        return self.precision in ("autocast", "bf16")

    @property
    def degrees(self) -> list[tuple[int, int, int, int]]:
        """Return the degrees of all topologies of the case."""
        names = (self.topology, *(event.goes_to for event in self.events if event.goes_to))
        return [TOPOLOGIES[name] for name in names]

    @property
    def splits(self) -> bool:
        """Return whether a rank has parts of tensors at any time."""
        return any(tp > 1 for _, _, tp, _ in self.degrees)

    @property
    def shares_experts(self) -> bool:
        """Return whether a rank has some of the experts at any time."""
        return any(ep > 1 for _, _, _, ep in self.degrees)

    @property
    def is_comparable(self) -> bool:
        """Return whether a job of these settings may be started, and does what one process does."""
        return self == _fit(self)

    def replicas(self, topology: str) -> int:
        """Ranks that take another part of a batch each."""
        world, _, tp, _ = TOPOLOGIES[topology]
        return world // tp

    def keeps_moments(self, former: str, later: str) -> bool:
        """Return whether full state has all moments: those of split parameters and shared experts are a rank's own."""
        return all(TOPOLOGIES[name][2:] == (1, 1) for name in (former, later))

    def settings(self, topology: str) -> dict[str, Any]:
        """Return what ``tsm.init`` gets."""
        _, shard, tp, ep = TOPOLOGIES[topology]
        return {
            "hybrid_shard_degree": shard,
            "tensor_parallel_degree": tp,
            "expert_parallel_degree": ep,
            "sm_activation_offloading": self.own_offloading,
            "activation_loading_horizon": self.horizon,
        }

    def to_json(self) -> str:
        """Return what differs from the plain case, as :meth:`from_json` reads it."""
        plain = dataclasses.asdict(Version2Case())
        differing = {name: value for name, value in dataclasses.asdict(self).items() if value != plain[name]}
        return json.dumps({"version": 2, **differing})

    @classmethod
    def from_json(cls, text: str) -> Version2Case:
        """Return the case of :meth:`to_json`."""
        values: Mapping[str, Any] = json.loads(text)
        events = tuple(Event(**event) for event in values.get("events", ()))
        given = {name: value for name, value in values.items() if name != "version"}
        return cls(**{**given, "events": events})


def draw_version2(seed: int | str, number: int, given: Mapping[str, Any] | None = None) -> Version2Case:
    """Draw the case of that number in a row of cases; the same for the same seed.

    Args:
        given: values of axes that are not drawn.
    """
    chance = random.Random(f"version 2/{seed}/{number}")
    values = {name: chance.choice(choices) for name, choices in AXES.items()}
    values["net"] = balanced(seed, "net", number, AXES["net"])
    values["topology"] = balanced(seed, "topology", number // 4, AXES["topology"])
    values |= dict(given or {})
    if chance.random() < 0.4 and "precision" not in (given or {}):  # most faults are silent where nothing is rounded
        values["precision"] = "float64"
    _draw_what_is_seldom(chance, values, given or {})
    if TOPOLOGIES[values["topology"]][3] > 1 and values["net"] not in _MIXTURES:
        values["net"] = chance.choice(_MIXTURES)
    if TOPOLOGIES[values["topology"]][3] > 2 and values["net"] == "mixtral":  # it has two experts
        values["net"] = "listed"
    case = Version2Case(**values)
    events = _draw_events(chance, case)
    return _fit(dataclasses.replace(case, events=events))


def _draw_what_is_seldom(chance: random.Random, values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Draw values more often that many cases cannot have, where they can; and mixtures less often, which shared experts need."""
    if TOPOLOGIES[values["topology"]][3] > 1 and "topology" not in given and chance.random() < 0.4:
        values["topology"] = chance.choice(AXES["topology"])
    _, shard, tp, ep = TOPOLOGIES[values["topology"]]
    is_wrapped = values["shards_by"] == "wrapper"
    is_mixture = values["net"] in _MIXTURES and ep == 1
    others = [
        ("net", is_mixture, [name for name in AXES["net"] if name not in _MIXTURES]),
        ("optimizer", not is_wrapped and tp == 1 and values["optimizer"] == "adamw", ["muon"]),
        ("strategy", is_wrapped and shard > 1 and values["strategy"] == "script", AXES["strategy"][2:]),
    ]
    for name, is_possible, choices in others:
        if is_possible and name not in given and chance.random() < (0.4 if name == "net" else 0.7):
            values[name] = chance.choice(choices)


def _draw_events(chance: random.Random, case: Version2Case) -> tuple[Event, ...]:
    found: list[Event] = []
    topology = case.topology
    # PyTorch's functions for the state of fully_shard make moments by an update with gradients of zero, if there are none yet:
    # those of weight decay then count, and Adam has made a step.
    first = 1 if case.shards_by == "function" else 0
    for step in sorted(chance.choices(range(first, STEPS), k=chance.choice((0, 1, 2, 3)))):
        kind, goes_to = chance.choice((*EVENTS, *_SELDOM)), ""
        if case.net in _MIXTURES and chance.random() < 0.3:
            kind = chance.choice(("resume_sharded", "resume_async"))
        if kind.startswith("resume"):
            fitting = _fitting(kind, topology, case)
            elsewhere = [name for name in fitting if TOPOLOGIES[name][3] != TOPOLOGIES[topology][3]]
            goes_to = topology = chance.choice(elsewhere if elsewhere and chance.random() < 0.6 else fitting)
        found.append(Event(step, kind, goes_to))
    return tuple(found)


def _fitting(kind: str, topology: str, case: Version2Case) -> list[str]:
    """Return the topologies in which a training may go on."""
    world, _, tp, _ = TOPOLOGIES[topology]
    if kind == "resume_local":
        return [topology]
    found = []
    for name, degrees in TOPOLOGIES.items():
        fits = kind == "resume_full" or degrees[2] == tp
        has_experts = degrees[3] == 1 or (
            case.net in _MIXTURES and (degrees[3] == 2 or case.net != "mixtral")
        )  # of two
        if degrees[0] == world and fits and has_experts:
            found.append(name)
    return found or [topology]


def _fit(case: Version2Case) -> Version2Case:
    """Return the case with plain values in place of those that do not go together."""
    values = _fit_model(case) | _fit_sharding(case)
    case = dataclasses.replace(case, **values)
    events = tuple(dataclasses.replace(event, kind=_fit_event(event, case)) for event in case.events)
    events = tuple(e if e.kind.startswith("resume") else dataclasses.replace(e, goes_to="") for e in events)
    return dataclasses.replace(case, events=events)


def _fit_model(case: Version2Case) -> dict[str, Any]:
    net, values = VERSION2_NETS[case.net], dict[str, Any]()
    if case.net in ("listed", "tabled") and case.is_rounded:  # other experts are chosen
        values["precision"] = "float32"
    if case.precision == "bf16" and case.net in (
        "images",
        "normed",
    ):  # kernels refuse float32 buffers beside such weights
        values["precision"] = "autocast"
    if values.get("precision", case.precision) in ("autocast", "bf16") and case.optimizer not in _ROUNDABLE:
        values["optimizer"] = "momentum"
    if case.delayed == "meta" and case.net not in _DRAWN_LATE:
        values["delayed"] = "none"
    if case.passes == 1:
        values["without_sync"] = False
    if not net.packs:
        values["packed"] = False
    if case.delayed != "none" and case.net == "tied":  # accelerate breaks ties, and the model has no tie_weights
        values["delayed"] = "none"
    values |= _fit_recomputation(case)
    if values.get("checkpointing", case.checkpointing) != "offload":
        values |= {"own_offloading": True, "horizon": 2}
    if case.units == "layers" and not net.from_transformers:  # modules that tsm.transform knows as blocks
        values["units"] = "blocks"
    return values


def _fit_recomputation(case: Version2Case) -> dict[str, Any]:
    """Return plain values in place of what PyTorch itself cannot do."""
    takes_back = case.checkpointing == "offload" and case.own_offloading  # what the second forward pass writes
    if case.checkpointing != "none" and case.net in _CHANGING and not takes_back:  # it changes buffers twice
        return {"checkpointing": "none"}
    # Blocks do not train if their inputs need no gradients, and units of FSDP fail in backward after two passes.
    has_gradients = not case.begins_frozen and case.net not in ("adapters", "recurrent", "nested")
    # Without units of blocks, FSDP has freed the parameters that the second forward pass of a block would read.
    has_units = case.units != "root" or case.shards_by == "function"
    if case.checkpointing == "reentrant" and (case.use == "twice" or not has_gradients or not has_units):
        return {"checkpointing": "each"}
    return {}


def _fit_sharding(case: Version2Case) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if case.optimizer == "muon" and (case.shards_by != "function" or case.splits):  # a rank has parts of matrices
        values["optimizer"] = "momentum" if case.precision in ("autocast", "bf16") else "adamw"
    if case.shards_by == "function":
        values |= {"strategy": "script", "joined": False, "delayed": "none"}
    # PyTorch leaves buffers in float32, and the blocks behind one refuse what has become float32 by it.
    keeps_buffers = case.net == "buffered" or (case.shards_by == "function" and case.net == "averaging")
    if case.precision == "bf16" and keeps_buffers:
        values["precision"] = "autocast"
    # PyTorch keeps gradients of such passes in bfloat16, and refuses them for a weight that two modules of a unit share.
    if case.precision == "bf16" and case.net == "tied" and case.shards_by != "function":
        values["without_sync"] = False
    if any(shard < 2 for _, shard, _, _ in case.degrees) and "HYBRID" in case.strategy:
        values["strategy"] = "script"
    # One flat parameter has one rate, and one answer to whether it trains.
    mixes = case.net == "adapters" or case.begins_frozen
    if case.joined and (case.splits or case.shares_experts or mixes):
        values["joined"] = False
    if values.get("joined", case.joined):
        values["grouped"] = False
    # FSDP's own norm is float32, which PyTorch refuses to compute from float64.
    has_norm = case.shards_by == "function" or case.precision != "float64"
    if case.clipping == "own" and (case.splits or case.shares_experts or not has_norm):
        values["clipping"] = "library"
    return values


def _fit_event(event: Event, case: Version2Case) -> str:
    """Return the event's kind, or another one that the case can have."""
    kind, net = event.kind, VERSION2_NETS[case.net]
    if kind == "shorten_samples" and not net.varies:
        return "double_batch"
    if kind == "write_buffers" and (net.from_transformers or case.net == "buffered"):
        return "reload_state"
    if kind == "fail" and case.net in _CHANGING:
        return "evaluate"  # a step that failed has changed them all the same
    if kind == "leave_pass_out" and case.passes == 1:
        return "scale_gradients"
    if kind == "drop_gradients" and case.joined and case.units == "root":
        return "scale_gradients"
    if case.shards_by == "function" and kind == "summon_weights":
        return "change_weights"
    if kind.startswith("resume") and case.net == "images":
        return "resume_full"  # of shards, PyTorch's checkpoint keeps the running statistics of any one replica
    if kind == "resume_local" and (case.shards_by == "function" or any(shard == 1 for _, shard, _, _ in case.degrees)):
        return "resume_sharded"  # FSDP's ranks, which name the folders, differ between copies of a whole state
    return kind
