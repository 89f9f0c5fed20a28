"""A case: what is combined, drawn from a seed, and the settings of the job that it is."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from crossings.nets import NETS

#: Samples of a step; every topology divides them, with microbatches and accumulated passes.
BATCH = 32

#: Degrees, with the number of ranks: pipeline, tensor parallel, sharded data parallel, and whether optimizer state is sharded.
TOPOLOGIES: dict[str, tuple[int, int, int, int, bool]] = {
    "one": (1, 1, 1, 1, False),
    "dp2": (2, 1, 1, 1, False),
    "o2": (2, 1, 1, 1, True),
    "s2": (2, 1, 1, 2, False),
    "tp2": (2, 1, 2, 1, False),
    "pp2": (2, 2, 1, 1, False),
    "dp4": (4, 1, 1, 1, False),
    "o4": (4, 1, 1, 1, True),
    "s4": (4, 1, 1, 4, False),
    "s2-dp2": (4, 1, 1, 2, False),
    "tp2-dp2": (4, 1, 2, 1, False),
    "tp2-o2": (4, 1, 2, 1, True),
    "tp2-s2": (4, 1, 2, 2, False),
    "tp4": (4, 1, 4, 1, False),
    "pp2-dp2": (4, 2, 1, 1, False),
    "pp2-o2": (4, 2, 1, 1, True),
    "pp2-s2": (4, 2, 1, 2, False),
    "pp2-tp2": (4, 2, 2, 1, False),
    "pp4": (4, 4, 1, 1, False),
    "pp2-tp2-dp2": (8, 2, 2, 1, False),
    "pp2-tp2-s2": (8, 2, 2, 2, False),
    "c2": (2, 1, 1, 1, False),
    "c4": (4, 1, 1, 1, False),
    "c2-dp2": (4, 1, 1, 1, False),
    "c2-o4": (4, 1, 1, 1, True),
    "c2-s2": (4, 1, 1, 2, False),
    "c4-s4": (4, 1, 1, 4, False),
    "c2-pp2": (4, 2, 1, 1, False),
    "c2-tp2": (4, 1, 2, 1, False),
}

#: Of those in which ranks share sequences out, how many do.
CONTEXT = {name: int(name[1]) for name in TOPOLOGIES if name.startswith("c")}

#: For those in which ranks share parameters, others of as many ranks and stages.
_UNSHARDED = {
    "s2": "o2",
    "s4": "o4",
    "s2-dp2": "o4",
    "c2-s2": "c2-o4",
    "c4-s4": "c4",
    "tp2-s2": "tp2-o2",
    "pp2-s2": "pp2-o2",
    "pp2-tp2-s2": "pp2-tp2-dp2",
}

#: Of each axis the plain value first: shrinking goes there.
AXES: dict[str, tuple[Any, ...]] = {
    "topology": tuple(TOPOLOGIES),
    "microbatches": (1, 2, 4),
    "prescaled": (False, True),
    "schedule": ("interleaved", "simple", "zero_bubble", "virtual_stages"),
    "fast_mode": (True, False),
    "step_program": (False, True),
    "precision": ("float64", "float32", "autocast", "bf16", "fp16"),
    "checkpointing": ("none", "each", "some", "inner", "offload"),
    "compiled": (False, True),
    "delayed": (False, True),
    "optimizer": ("sgd", "momentum", "adam", "adamw", "adagrad", "rmsprop", "lamb", "novograd", "muon"),
    "clipping": ("none", "master", "torch", "total", "largest", "value"),
    "passes": (1, 2),
    "counted_passes": (False, True),
    "host_collectives": (False, True),
    "optimize": ("memory", "speed"),
    "placement": ("cluster", "spread"),
    "manual": (False, True),
    "whole_experts": (False, True),
    "recorded": (False, True),
    "scaled": (False, True),
    "grouped": (False, True),
    "small_buckets": (False, True),
    "begins_frozen": (False, True),
    "zeroes": (False, True),
    "without_sync": (False, True),
    "hooked": (False, True),
    "unchecked": (False, True),
    "later_group": (False, True),
    "packed": (False, True),
    "use": ("once", "twice", "teacher", "penalty"),
    "net": tuple(NETS),
}

#: What happens between two steps: methods of ``Training``. ``resume…`` and ``reshape`` go to another topology of as many ranks.
EVENTS = (
    "evaluate",
    "evaluate_within",
    "freeze",
    "double_batch",
    "shorten_samples",
    "resume_partial",
    "resume_full",
    "resume_async",
    "resume_memory",
    "reshape",
    "reload_state",
    "change_weights",
    "scale_gradients",
    "scale_clipped",
    "leave_pass_out",
    "set_gradients",
    "lower_rate",
    "swap_weights",
    "drop_gradients",
    "fail",
    "write_buffers",
    "generate",
    "rest_block",
)

#: Those that many cases cannot have, and the others have instead.
_SELDOM = ("evaluate_within", "freeze", "leave_pass_out")

#: Those that go to another topology.
MOVES = ("resume_partial", "resume_full", "resume_async", "resume_memory", "reshape")
#: Optimizers that are well conditioned where gradients are rounded to half precision.
_ROUNDABLE = ("sgd", "momentum")
#: Models whose forward pass changes buffers, or parameters that nothing trains.
_CHANGING = ("images", "averaging", "follower", "normed")

#: Models with functions that only ranks that share sequences out call.
_OF_SEQUENCES = ("flexible", "ranges")

#: Those that take norms of whole tensors, or whole matrices.
_OF_TENSORS = ("lamb", "novograd", "muon")
#: Of these, those that know no tensors but the parameters, of which distributed forms of a model may have others.
_OF_PARAMETERS = ("lamb", "novograd")
#: Events that are left out by those models that generate.
_GENERATES_INSTEAD = (
    "evaluate",
    "double_batch",
    "lower_rate",
    "scale_gradients",
    "scale_clipped",
    "drop_gradients",
    "fail",
)
STEPS = 5
#: With step programs: the first steps of a job have none, and neither has a step or two after one of another course.
STEPS_WITH_PROGRAM = 10


@dataclass(frozen=True)
class Event:
    """What happens before a step.

    Attributes:
        goes_to: the topology after it, where it changes.
    """

    step: int
    kind: str
    goes_to: str = ""


@dataclass(frozen=True)
class Case:
    """One combination; the fields but the last are those of :data:`AXES`."""

    topology: str = "one"
    microbatches: int = 1
    prescaled: bool = False
    schedule: str = "interleaved"
    fast_mode: bool = True
    step_program: bool = False
    precision: str = "float64"
    checkpointing: str = "none"
    compiled: bool = False
    delayed: bool = False
    optimizer: str = "sgd"
    clipping: str = "none"
    passes: int = 1
    counted_passes: bool = False
    host_collectives: bool = False
    optimize: str = "memory"
    placement: str = "cluster"
    manual: bool = False
    whole_experts: bool = False
    recorded: bool = False
    scaled: bool = False
    grouped: bool = False
    small_buckets: bool = False
    begins_frozen: bool = False
    zeroes: bool = False
    without_sync: bool = False
    hooked: bool = False
    unchecked: bool = False
    later_group: bool = False
    packed: bool = False
    use: str = "once"
    net: str = "perceptron"
    events: tuple[Event, ...] = ()

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return TOPOLOGIES[self.topology][0]

    @property
    def steps(self) -> int:
        """How many it trains."""
        return STEPS_WITH_PROGRAM if self.step_program else STEPS

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters that the script makes."""
        return torch.float64 if self.precision == "float64" else torch.float32

    @property
    def is_comparable(self) -> bool:
        """Whether a job of these settings may be started, and does what one process does."""
        kinds = {event.kind for event in self.events}
        splits, shards, gathers = False, False, False
        for name in self._topologies(*MOVES):
            _, _, tp, sdp, _ = TOPOLOGIES[name]
            splits, shards, gathers = splits or tp > 1, shards or (tp > 1 and sdp > 1), gathers or sdp > 1
        # Sharded data parallelism wants one batch of a tensor parallel group; other code in a divided model sees the group's batch.
        reads_own = self.net == "averaging" or NETS[self.net].branches
        reads_one_batch = self.prescaled or not (shards or (splits and reads_own))
        # What a step that failed has written into buffers stays; of what is frozen when the model is wrapped nothing trains later.
        events_fit = not ("fail" in kinds and self.net in _CHANGING) and not ("freeze" in kinds and self.begins_frozen)
        # Distributed forms of a model may divide its weights into other parameters, and have other buffers.
        is_own = not NETS[self.net].from_transformers
        # A script that places its modules names stages, of which another number of stages has others.
        stages_fit = not self.manual or len({TOPOLOGIES[name][1] for name in self._topologies("reshape")}) == 1
        return (
            reads_one_batch
            and not (gathers and NETS[self.net].branches)  # ranks that share parameters gather the same ones
            and events_fit
            and stages_fit
            and not ("generate" in kinds and (self.is_rounded or not NETS[self.net].generates))
            and (is_own or not (self.optimizer in _OF_PARAMETERS or "write_buffers" in kinds))
            and not (self.net == "buffered" and "write_buffers" in kinds)
        )

    def _topologies(self, *kinds: str) -> tuple[str, ...]:
        """The first one, and those to which these kinds of events go."""
        return (self.topology, *(event.goes_to for event in self.events if event.kind in kinds))

    @property
    def shares_sequences_out(self) -> bool:
        """Whether ranks have slices of sequences at any time."""
        return any(name in CONTEXT for name in self._topologies(*MOVES))

    @property
    def divides_layers(self) -> bool:
        """Whether ranks have parts of layers at any time."""
        return any(TOPOLOGIES[name][2] > 1 for name in self._topologies(*MOVES))

    @property
    def divides_parameters(self) -> bool:
        """Whether a rank has a part of some parameters at any time."""
        degrees = [TOPOLOGIES[name] for name in self._topologies(*MOVES)]
        return any(tp > 1 or sdp > 1 for _, _, tp, sdp, _ in degrees)

    @property
    def has_stages(self) -> bool:
        """Whether the job is a pipeline at any time."""
        return any(TOPOLOGIES[name][1] > 1 for name in self._topologies(*MOVES))

    @property
    def is_placed_untraced(self) -> bool:
        """Whether stages are chosen without knowing what a step reads.

        Late parameters have no values. The tracing step cannot follow a model whose samples decide which modules run.
        """
        samples_decide = NETS[self.net].branches or self.net == "mixtral"
        return self.has_stages and (self.manual or (self.delayed and samples_decide))

    @property
    def is_half(self) -> bool:
        """Whether the job's weights are in half precision."""
        return self.precision in ("bf16", "fp16")

    @property
    def is_rounded(self) -> bool:
        """Whether the job computes in half precision."""
        return self.is_half or self.precision == "autocast"

    def replicas(self, topology: str) -> int:
        """Ranks that take another part of a batch each."""
        world, pp, tp, _, _ = TOPOLOGIES[topology]
        return world // pp // (tp if self.prescaled else 1) // CONTEXT.get(topology, 1)

    def settings(self, topology: str) -> dict[str, Any]:
        """What ``smp.init`` gets; the same settings are named for each topology, so that one can change into another."""
        _, pp, tp, sdp, shards_state = TOPOLOGIES[topology]
        found: dict[str, Any] = {
            "ddp": True,
            "pipeline_parallel_degree": pp,
            "tensor_parallel_degree": tp,
            "sharded_data_parallel_degree": sdp,
            "context_parallel_degree": CONTEXT.get(topology, 1),
            "shard_optimizer_state": shards_state,
            "microbatches": self.microbatches,
            "prescaled_batch": self.prescaled,
            "fast_mode": self.fast_mode,
            "step_program": self.step_program,
            "host_collectives": self.host_collectives,
            "optimize": self.optimize,
            "placement_strategy": self.placement,
            "offload_activations": self.checkpointing == "offload",
            "compile": self.compiled,
            "compile_backend": "eager",
            "pipeline": "interleaved" if self.schedule == "virtual_stages" else self.schedule,
            "virtual_stages": 2 if self.schedule == "virtual_stages" and pp > 1 and not self.manual else 1,
            "sdp_param_persistence_threshold": 0,
            "sdp_gradient_clipping": 1e9,
            "check_invariants": not self.unchecked,
        }
        if self.is_half:
            found[self.precision] = True
        if self.manual:
            found |= {"auto_partition": False, "default_partition": 0}
        if self.whole_experts:
            found["expert_parallel_degree"] = tp
        return found

    def to_json(self) -> str:
        """What differs from the plain case, as :meth:`from_json` reads it."""
        plain = dataclasses.asdict(Case())
        return json.dumps({name: value for name, value in dataclasses.asdict(self).items() if value != plain[name]})

    @classmethod
    def from_json(cls, text: str) -> Case:
        """The case of :meth:`to_json`."""
        return cls._of(json.loads(text))

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> Case:
        events = tuple(Event(**event) for event in values.get("events", ()))
        return cls(**{**values, "events": events})


def balanced(seed: int | str, name: str, number: int, choices: Sequence[Any]) -> Any:
    """Return the value of a case on an axis of many values: each comes once among as many cases in a row as it has values."""
    return random.Random(f"{seed}/{name}").sample(choices, len(choices))[number % len(choices)]


def draw(seed: int | str, number: int, given: Mapping[str, Any] | None = None) -> Case:
    """Draw the case of that number in a row of cases; the same for the same seed.

    Args:
        given: values of axes that are not drawn.
    """
    chance = random.Random(f"{seed}/{number}")
    values = {name: chance.choice(choices) for name, choices in AXES.items()}
    values |= {name: balanced(seed, name, number, AXES[name]) for name in ("topology", "net")} | dict(given or {})
    if values["net"] in _OF_SEQUENCES and "topology" not in (given or {}):
        values["topology"] = chance.choice(list(CONTEXT))
    if chance.random() < 0.4 and "precision" not in (given or {}):  # most faults are silent where nothing is rounded
        values["precision"] = "float64"
    if chance.random() < 0.6:  # it takes longer than all the rest of a case
        values["compiled"] = False
    if chance.random() < 0.6 and "recorded" not in (given or {}):  # it takes as long as the rest, and only listens
        values["recorded"] = False
    if values["precision"] in ("autocast", "bf16", "fp16") and values["optimizer"] not in _ROUNDABLE:
        values["optimizer"] = chance.choice(_ROUNDABLE)
    if values["net"] == "normed" and values["precision"] in ("autocast", "bf16", "fp16"):
        values["precision"] = "float32"  # its power iteration carries roundings from step to step
    world, pp, tp, *_ = TOPOLOGIES[values["topology"]]
    if pp > 1 and values["microbatches"] == 1:
        values["microbatches"] = 4
    if values["optimizer"] in _OF_TENSORS and values["net"] == "images":
        values["precision"] = "float64"  # biases before batch norms have gradients of nothing but rounding
    if values["optimizer"] in _OF_PARAMETERS and NETS[values["net"]].from_transformers:
        values["optimizer"] = "muon"  # distributed forms of a model may divide its weights into other parameters
    if values["optimizer"] == "muon" and values["net"] == "mixtral":
        values["optimizer"] = (
            "adam"  # with one expert for a token, the router's gradient is nothing but rounding in float32
        )
    if tp == 1:
        values["prescaled"] = False
    if world == 1:
        values |= {"host_collectives": False, "placement": "cluster"}
    if tp == 1:
        values["optimize"] = "memory"
    if values["passes"] == 1:
        values["counted_passes"] = False
    if values["passes"] == 1 or values["counted_passes"]:
        values["without_sync"] = False
    if pp == 1:
        values["manual"] = False
    if values["precision"] in ("bf16", "fp16") or values["later_group"]:
        values["scaled"] = False  # the optimizer does it; a scaler leaves what its optimizer does not have
    if values["schedule"] == "virtual_stages":
        values["manual"] = False  # the script would place everything itself
    values["packed"] = values["packed"] and NETS[values["net"]].packs
    events = _events(chance, values)
    case = Case(**values, events=events)
    if not case.has_stages:
        case = dataclasses.replace(case, schedule="interleaved", fast_mode=True, step_program=False)
    if case.shares_sequences_out:
        case = dataclasses.replace(case, compiled=False, prescaled=case.prescaled or case.divides_layers)
    if case.use == "penalty" and (case.shares_sequences_out or case.divides_parameters or case.is_placed_untraced):
        case = dataclasses.replace(case, use="teacher")
    if not case.is_comparable and NETS[case.net].branches:
        events = tuple(dataclasses.replace(e, goes_to=_UNSHARDED.get(e.goes_to, e.goes_to)) for e in events)
        case = dataclasses.replace(case, topology=_UNSHARDED.get(case.topology, case.topology), events=events)
    return case if case.is_comparable else dataclasses.replace(case, prescaled=True)


def _events(chance: random.Random, values: Mapping[str, Any]) -> tuple[Event, ...]:
    """Up to three, which may come before the same step."""
    topology, found = values["topology"], []
    world = TOPOLOGIES[topology][0]
    others = [name for name, (ranks, *_) in TOPOLOGIES.items() if ranks == world]
    steps = STEPS_WITH_PROGRAM if values["step_program"] else STEPS
    for step in sorted(chance.choices(range(steps), k=chance.choice((0, 1, 2, 3)))):
        kind = chance.choice((*EVENTS, *_SELDOM))
        if kind == "shorten_samples" and not NETS[values["net"]].varies:
            kind = "double_batch"
        if kind == "freeze" and values["begins_frozen"]:
            kind = "drop_gradients"  # what is frozen when the model is wrapped stays so
        if kind == "write_buffers" and (NETS[values["net"]].from_transformers or values["net"] == "buffered"):
            kind = "reload_state"  # distributed forms have other buffers, and checkpoints not those that are not persistent
        if kind == "fail" and values["net"] in _CHANGING:
            kind = "drop_gradients"  # a step that failed has changed them all the same
        # Few models can: those that can do it in place of other events too.
        generates = values["precision"] in ("float64", "float32") and NETS[values["net"]].generates
        if generates and kind in _GENERATES_INSTEAD:
            kind = "generate"
        if kind == "generate" and not generates:
            kind = "evaluate"
        if kind == "leave_pass_out" and values["passes"] == 1:
            kind = "scale_gradients"
        moves = kind in MOVES
        is_unplaced = step == 0 or any(event.step == step and event.goes_to for event in found)
        if is_unplaced and (moves or kind == "swap_weights"):
            kind, moves = "reload_state", False  # the first step decides what goes where
        if kind == "reload_state" and any(event.step == step and event.goes_to for event in found):
            kind = "lower_rate"  # a state that waits for the first step cannot be read before it
        if moves:
            stages = TOPOLOGIES[topology][1]
            fit = [name for name in others if TOPOLOGIES[name][1] == stages] if values["manual"] else others
            topology = chance.choice(fit)
        found.append(Event(step, kind, topology if moves else ""))
    return tuple(found)
