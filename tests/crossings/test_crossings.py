"""Combinations of features train as one process does: some that were wrong once, and what draws and shrinks others."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from crossings import version2_case
from crossings.alone import Alone
from crossings.case import AXES, TOPOLOGIES, Case, Event, draw
from crossings.outcome import Outcome, Runner, compare
from crossings.reports import ledger, shares
from crossings.shrinking import shrink
from crossings.training import Record
from crossings.version2_case import Version2Case, draw_version2
from crossings.version2_events import AloneInVersion2
from support.ranks import rank_pool
from support.ranks.rank_pool import MOST_RANKS, RankPool

from smp_launch.watch.states import State

#: Each was wrong once, or has what the others lack; together they have every value of the axes that costs little.
FIXED = {
    "steps that accumulate with a batch per tensor parallel rank": Case(topology="tp2", passes=2),
    "the same in a pipeline with gradients of weights left for later": Case(
        topology="pp2-tp2", passes=2, microbatches=2, schedule="zero_bubble", clipping="master", optimizer="momentum"
    ),
    "batch norms in half precision with sharded state": Case(
        topology="o2", precision="bf16", net="images", events=(Event(2, "evaluate"), Event(3, "scale_gradients"))
    ),
    "late buffers of arithmetic in a pipeline": Case(
        topology="pp2", microbatches=2, delayed=True, net="buffered", events=(Event(3, "reload_state"),)
    ),
    "buffers of other stages in half precision, created late": Case(
        topology="pp2-s2", microbatches=2, precision="fp16", delayed=True, net="buffered", checkpointing="each"
    ),
    "what is created late is loaded before the first step": Case(
        topology="pp2-tp2", microbatches=2, precision="fp16", delayed=True, net="images", events=(Event(0, "reload_state"),)
    ),
    "and by replicas that would have drawn other values": Case(
        topology="pp2-dp2", microbatches=2, delayed=True, events=(Event(0, "reload_state"),)
    ),
    "sharded masters of experts that are whole on one rank": Case(
        topology="tp2-o2", prescaled=True, precision="bf16", whole_experts=True, net="mixtral"
    ),
    "and on a stage": Case(topology="pp2-tp2", microbatches=2, prescaled=True, whole_experts=True, net="mixtral"),
    "and with sharded parameters, where each rank has other tokens": Case(
        topology="tp2-s2", microbatches=4, prescaled=True, passes=2, counted_passes=True, whole_experts=True, net="mixtral"
    ),
    "gradients of a pipeline are halved after clipping": Case(
        topology="pp2-s2", microbatches=2, precision="fp16", clipping="master", small_buckets=True,
        events=(Event(1, "scale_clipped"), Event(3, "scale_gradients"), Event(3, "scale_clipped")),
    ),
    "microbatches on threads under the script's autocast": Case(
        topology="pp2-s2", microbatches=4, precision="autocast", manual=True, net="adapters"
    ),
    "replicas and passes train different parameters": Case(
        topology="o2", optimizer="adamw", passes=2, net="forked", events=(Event(2, "scale_gradients"),)
    ),
    "layers that are frozen and divided go on undivided": Case(
        topology="tp2", prescaled=True, events=(Event(1, "freeze"), Event(2, "reshape", "dp2"))
    ),
    "two documents in each sample, whose layers are divided": Case(topology="tp2", net="gpt2", packed=True),
    "stages by hand with a batch per tensor parallel rank": Case(topology="pp2-tp2", microbatches=2, manual=True),
    "patches of images on a stage that is divided": Case(topology="pp2-tp2", microbatches=2, precision="bf16", net="vit"),
    "a late Llama is traced": Case(topology="pp2", microbatches=4, delayed=True, net="llama", schedule="simple"),
    "a sharded LSTM goes on in a pipeline": Case(
        topology="s4", optimizer="adamw", net="recurrent", events=(Event(2, "resume_partial", "pp2-o2"), Event(4, "reshape", "dp4"))
    ),
    "weights are tied, changed, and saved whole": Case(
        topology="pp2-dp2", microbatches=2, optimizer="adam", net="tied",
        events=(Event(1, "change_weights"), Event(3, "resume_full", "tp2-dp2")),
    ),
    "an incomplete group of passes": Case(
        topology="s2", passes=2, counted_passes=True, clipping="torch", optimizer="rmsprop", net="initialised",
        events=(Event(2, "leave_pass_out"), Event(3, "double_batch")),
    ),
    "frozen and offloaded in a U-Net": Case(
        topology="pp2-dp2", microbatches=2, schedule="virtual_stages", checkpointing="offload", net="skips",
        events=(Event(2, "freeze"), Event(4, "freeze")),
    ),
    "compiled blocks in nested structures over shared memory": Case(
        topology="tp2-s2", prescaled=True, compiled=True, host_collectives=True, net="nested", optimizer="lamb",
        events=(Event(1, "lower_rate"), Event(3, "shorten_samples")),
    ),
    "gradients of weights come later than others of the same sharded block": Case(
        topology="pp2-s2", microbatches=4, schedule="zero_bubble", net="gains"
    ),
    "a running average on one stage in half precision": Case(
        topology="pp2", microbatches=4, precision="bf16", net="averaging",
        events=(Event(2, "swap_weights"), Event(3, "write_buffers")),
    ),
    "state of frozen parameters that an optimizer makes at once": Case(
        topology="s2", optimizer="adagrad", begins_frozen=True, grouped=True,
        events=(Event(2, "reload_state"), Event(3, "resume_partial", "dp2"), Event(4, "reshape", "o2")),
    ),
    "hooks of gradients in a pipeline that is created late": Case(
        topology="pp2", microbatches=2, delayed=True, hooked=True, events=(Event(2, "reshape", "s2"),)
    ),
    "passes without averaging, and gradients that are set to zero": Case(
        topology="s2", passes=2, without_sync=True, zeroes=True, unchecked=True, optimizer="adamw", net="late_head",
        events=(Event(1, "set_gradients"),),
    ),
    "gradients that are set to zero of what trains later, with sharded state": Case(
        topology="o2", zeroes=True, later_group=True, optimizer="momentum", net="late_head", events=(Event(0, "set_gradients"),)
    ),
    "a job that goes on has no gradients of zeros, for what its step does not use": Case(
        topology="pp2", microbatches=2, zeroes=True, optimizer="adamw", net="late_head", events=(Event(3, "resume_partial", "pp2"),)
    ),
    "gradients that the script sets before a pass in a pipeline, and clips": Case(
        topology="pp2-o2", microbatches=4, clipping="torch", net="tied",
        events=(Event(0, "set_gradients"), Event(3, "set_gradients")),
    ),
    "a block that trains later counts in the norm": Case(
        topology="s2", later_group=True, clipping="torch", optimizer="adam", use="teacher", events=(Event(3, "rest_block"),)
    ),
    "and where its weights are divided": Case(
        topology="tp2-o2", prescaled=True, precision="fp16", later_group=True, clipping="torch", use="twice"
    ),
    "weights that are computed of others are not divided": Case(
        topology="tp2", prescaled=True, net="normed", precision="bf16", events=(Event(2, "reload_state"),)
    ),
    "and created late on stages": Case(topology="pp2-s2", microbatches=2, delayed=True, net="normed"),
    "a late mask of pruned weights goes along": Case(
        topology="tp2", prescaled=True, delayed=True, net="pruned", events=(Event(3, "reshape", "o2"),)
    ),
    "a model that checkpoints itself leaves gradients of weights for later": Case(
        topology="pp2-s2", microbatches=4, schedule="zero_bubble", net="recomputed"
    ),
    "a state that waits for the first step meets a new group": Case(
        topology="pp2", microbatches=2, later_group=True, optimizer="adam", events=(Event(2, "resume_full", "pp2"),)
    ),
    "pruned weights that are frozen and created late": Case(
        topology="pp2", microbatches=2, delayed=True, begins_frozen=True, net="pruned"
    ),
    "a sharded parameter is read while another microbatch waits in the same module": Case(
        topology="pp2-tp2-s2", microbatches=4, prescaled=True, schedule="virtual_stages", checkpointing="each", use="teacher",
        net="vit",
    ),
    "a running average that moves by less than half precision rounds": Case(
        topology="pp2", microbatches=2, precision="bf16", net="averaging"
    ),
    "a frozen parameter that forward moves, on a stage that is traced first": Case(
        topology="pp2", microbatches=2, net="follower"
    ),
    "children of a sharded, compiled container are computed again": Case(
        topology="s2", checkpointing="each", compiled=True, net="chained"
    ),
    "a checkpointed block moves a frozen parameter once": Case(topology="dp2", checkpointing="each", passes=2, net="follower"),
    "what moves in forward is created late, and on a stage": Case(topology="pp2", microbatches=2, delayed=True, net="follower"),
    "compiled blocks move sharded parameters": Case(topology="s2", compiled=True, net="follower"),
    "one microbatch moves a sharded parameter that another's graph has": Case(
        topology="pp2-s2", microbatches=2, schedule="simple", net="follower"
    ),
    "a graph keeps what a sharded parameter was before the second call moved it": Case(
        topology="pp2-s2", microbatches=2, use="twice", net="follower"
    ),
    "every replica scores what the script writes into frozen parameters that forward moves": Case(
        topology="dp2", net="follower",
        events=(Event(3, "change_weights"), Event(3, "evaluate"), Event(4, "swap_weights"), Event(4, "evaluate")),
    ),
    "and what it writes and loads into buffers of its own": Case(
        topology="dp2", net="images",
        events=(Event(3, "evaluate"), Event(3, "write_buffers"), Event(3, "reload_state"), Event(3, "evaluate")),
    ),
    "an evaluation between passes, and training goes on from memory in a pipeline": Case(
        topology="s2", microbatches=2, clipping="largest", passes=2, optimizer="adam", step_program=True,
        events=(Event(1, "evaluate_within"), Event(3, "resume_memory", "pp2")),
    ),
    "gradients that are set to zero do not outlive a change of degrees": Case(
        topology="dp2", optimizer="adam", zeroes=True, net="late_head", events=(Event(3, "reshape", "s2"),)
    ),
    "a head of some batches only": Case(topology="o4", optimizer="adagrad", net="late_head", passes=2),
}  # fmt: skip


#: Those of them that the short run leaves out.
LONGER = {
    "buffers of other stages in half precision, created late",
    "gradients that the script sets before a pass in a pipeline, and clips",
    "a sharded LSTM goes on in a pipeline",
    "children of a sharded, compiled container are computed again",
    "compiled blocks move sharded parameters",
    "one microbatch moves a sharded parameter that another's graph has",
    "a sharded parameter is read while another microbatch waits in the same module",
    "a state that waits for the first step meets a new group",
    "pruned weights that are frozen and created late",
    "and by replicas that would have drawn other values",
    "and created late on stages",
    "and on a stage",
    "and where its weights are divided",
    "the same in a pipeline with gradients of weights left for later",
    "late buffers of arithmetic in a pipeline",
    "what is created late is loaded before the first step",
    "sharded masters of experts that are whole on one rank",
    "stages by hand with a batch per tensor parallel rank",
    "patches of images on a stage that is divided",
    "a late Llama is traced",
    "gradients of weights come later than others of the same sharded block",
    "a running average on one stage in half precision",
    "a head of some batches only",
    "and with sharded parameters, where each rank has other tokens",
}


@pytest.fixture
def runner(ranks: Callable[..., list[Record]]) -> Runner:
    return Runner(ranks)


@pytest.fixture(scope="module")
def large_runner() -> Iterator[Runner]:
    """For more ranks than other tests have."""
    with Runner() as made:
        yield made


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=pytest.mark.full if name in LONGER else ()) for name, case in FIXED.items()],
)
def test_a_combination_trains_as_one_process(request: pytest.FixtureRequest, case: Case) -> None:
    name = "large_runner" if case.world > MOST_RANKS else "runner"
    outcome = request.getfixturevalue(name).run(case)
    assert (outcome.kind, outcome.detail) == ("equal", "")


def test_a_checkpointed_module_that_moves_sharded_parameters_is_refused(runner: Runner) -> None:
    outcome = runner.run(Case(topology="s2", checkpointing="each", net="follower"))
    assert (outcome.kind, outcome.detail) == ("refused", "a checkpointed module moves its own sharded parameters")
    # The same write a second time is none.
    assert runner.run(Case(topology="s2", checkpointing="each", net="clamped")).kind == "equal"


@pytest.mark.parametrize("kind", ["swap_weights", "change_weights", "reload_state"])
def test_one_process_in_place_of_replicas_scores_as_with_the_whole_batch(kind: str) -> None:
    case = Case(topology="one", net="follower", events=(Event(4, kind), Event(4, "evaluate")))
    whole, replicas = Alone(case).run(), Alone(dataclasses.replace(case, topology="dp2")).run()
    assert replicas.scores == pytest.approx(whole.scores, rel=1e-9)


def test_every_value_is_drawn() -> None:
    drawn = [draw(3, number) for number in range(4000)]
    assert drawn[:50] == [draw(3, number) for number in range(50)]
    assert len(set(drawn)) > 3980
    for name, values in AXES.items():
        found = Counter(getattr(case, name) for case in drawn)
        assert min(found[value] for value in values) >= 120, (name, found)
    assert min(share for _, share in shares(drawn + [draw_version2(3, number) for number in range(2000)])) >= 0.03
    assert all(case.is_comparable for case in drawn)
    # A loss may read parameters only where they are whole, and on its own stage.
    assert not any(case.use == "penalty" and case.is_placed_untraced for case in drawn)
    for case in drawn[:200]:
        assert Case.from_json(case.to_json()) == case


#: The same for version 2 of the library.
VERSION_2 = {
    "shards of experts beside other replicas": Version2Case(
        topology="ep2-s2", shards_by="function", units="blocks", optimizer="adam", clipping="library", passes=2,
        without_sync=True, net="tabled", events=(Event(2, "resume_async", "ep2-dp2"), Event(4, "resume_full", "script4")),
    ),
    "layers that are split, created late, offloaded and resumed without": Version2Case(
        topology="tp2-s2", units="layers", checkpointing="offload", horizon=1, delayed="meta", optimizer="adamw", passes=2,
        net="llama", events=(Event(1, "evaluate"), Event(3, "resume_full", "s4")),
    ),
    "an optimizer's groups of experts in lists go to another degree": Version2Case(
        topology="ep2-s2", optimizer="adagrad", net="listed", events=(Event(2, "resume_sharded", "ep4"),)
    ),
    "experts in blocks that are created when they are sharded": Version2Case(
        topology="ep2", units="layers", delayed="meta", clipping="library", net="mixtral"
    ),
    "the first rank's weights in half precision, and a local checkpoint": Version2Case(
        topology="s2", units="blocks", strategy="SHARD_GRAD_OP", precision="bf16", checkpointing="reentrant", delayed="rank0",
        grouped=True, clipping="own", net="initialised", events=(Event(2, "resume_local", "s2"), Event(3, "summon_weights")),
    ),
}  # fmt: skip


#: The short run has its parts in tests/version2: test_transform.py, test_delayed_parameters.py and test_offloading.py.
LONGER_OF_VERSION_2 = "layers that are split, created late, offloaded and resumed without"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name == LONGER_OF_VERSION_2 else ()) for name in VERSION_2],
)
def test_a_combination_of_version_2_trains_as_one_process(runner: Runner, name: str) -> None:
    outcome = runner.run(VERSION_2[name])
    assert (outcome.kind, outcome.detail) == ("equal", "")


def _loads_at_other_expert_degree(case: Version2Case) -> bool:
    """Return whether a sharded checkpoint goes from one expert parallel degree to another."""
    former = case.topology
    for event in (event for event in case.events if event.goes_to):
        before, after = (version2_case.TOPOLOGIES[name][3] for name in (former, event.goes_to))
        if event.kind in ("resume_sharded", "resume_async") and before != after:
            return True
        former = event.goes_to
    return False


def test_every_value_of_version_2_is_drawn() -> None:
    drawn = [draw_version2(3, number) for number in range(2000)]
    assert drawn[:50] == [draw_version2(3, number) for number in range(50)]
    for name, values in version2_case.AXES.items():
        found = Counter(getattr(case, name) for case in drawn)
        assert min(found[value] for value in values) >= 60, (name, found)
    assert sum(_loads_at_other_expert_degree(case) for case in drawn) >= 60
    assert all(case.is_comparable for case in drawn)
    for case in drawn[:200]:
        assert Version2Case.from_json(case.to_json()) == case


def test_a_difference_is_found(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Alone, "lower_rate", lambda self, step: None)  # the job does it
    outcome = runner.run(Case(topology="dp2", events=(Event(2, "lower_rate"),)))
    assert outcome.kind == "wrong"
    assert "losses[3]" in outcome.detail
    monkeypatch.setattr(AloneInVersion2, "lower_rate", lambda self, step: None)
    outcome = runner.run(Version2Case(topology="s2", events=(Event(2, "lower_rate"),)))
    assert outcome.kind == "wrong"
    assert "losses[3]" in outcome.detail


@pytest.mark.skipif(
    not os.path.exists("/proc/self/schedstat"), reason="the system does not count who waits for a processor"
)
@pytest.mark.parametrize(("does", "wants"), [("while True: pass", True), ("import time; time.sleep(1000)", False)])
def test_a_case_that_computes_has_more_time_than_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch, does: str, wants: bool
) -> None:
    code = f"print(flush=True)\n{does}"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pool: Any = RankPool.__new__(RankPool)
        pool._ranks = [(process, None)]
        assert pool._want_processors(1) is wants
        # Nor is one that waits for a processor all the time, which the system counts later.
        monkeypatch.setattr(rank_pool, "state_of", lambda pid: State("R"))
        assert pool._want_processors(1) is wants
        process.kill()


class _Scripted(Runner):
    """A runner whose cases end as given, one after the other."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.kinds, self.fresh = list(kinds), 0

    def _close(self) -> None:
        self.fresh += self._has_run
        super()._close()

    def run_once(self, case: object) -> Outcome:
        self._has_run = True
        return Outcome(self.kinds.pop(0), "", 0.0)


def test_faults_and_some_equal_cases_are_repeated_in_fresh_processes() -> None:
    runner = _Scripted(*["equal"] * 20, "equal", "wrong", "wrong", "equal", "hang", "equal", "refused")
    found = [runner.run(Case()).kind for _ in range(24)]
    assert found == [*["equal"] * 20, "wrong", "equal", "unsteady", "refused"]
    assert runner.fresh == 3


def test_a_ledger_counts_each_commit_and_seed() -> None:
    line = {"commit": "abc", "seed": "1", "kind": "equal", "detail": "", "processor_seconds": 2.0}
    refused, wrong = {**line, "kind": "refused", "detail": "why"}, {**line, "kind": "hang", "seed": "2"}
    rows = list(ledger([line, refused, refused, wrong, {**line, "processor_seconds": 0.0}]))[2:]
    assert rows == [
        "| abc | 1 | 4 | 2 | 2 × why | 0 | 2.0 |",
        "| abc | 2 | 1 | 0 | 0 | 1 hang | 2.0 |",
        "| all |  | 5 | 2 | 2 × why | 1 hang | 2.0 |",
    ]


def _record(**values: float) -> Record:
    weights = {"weight": torch.tensor([values.get("weight", 1.0)], dtype=torch.float64)}
    losses, norms, scores = ([values.get(what, 1.0)] for what in ("loss", "norm", "score"))
    first = {"weight": torch.zeros(1, dtype=torch.float64)}
    return Record(losses, scores, norms, first, weights, {"weight"})


@pytest.mark.parametrize("precision", ["float64", "fp16"])
@pytest.mark.parametrize("what", ["loss", "norm", "score", "weight"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_a_difference(number: float, what: str, precision: str) -> None:
    """In the job, in one process, and in both: a comparison with NaN or infinity shows nothing."""
    case, plain, bad = Case(precision=precision), _record(), _record(**{what: number})
    assert compare(case, plain, [plain]) == ""
    assert compare(case, plain, [bad])
    assert compare(case, bad, [plain])
    assert compare(case, bad, [bad])


def test_shrinking_keeps_what_the_fault_needs() -> None:
    case = dataclasses.replace(
        draw(3, 1), topology="pp2-tp2", passes=2, net="tied", events=(Event(1, "evaluate"), Event(2, "freeze"))
    )

    def is_fault(other: Case) -> bool:
        _, _, tp, _, _ = TOPOLOGIES[other.topology]
        return tp > 1 and other.passes == 2 and any(event.kind == "freeze" for event in other.events)

    assert shrink(case, is_fault) == Case(topology="tp2", passes=2, events=(Event(2, "freeze"),))
    late = Version2Case(
        topology="tp2-s2", optimizer="adam", net="llama", events=(Event(1, "fail"), Event(2, "lower_rate"))
    )
    assert shrink(late, lambda other: other.splits and other.optimizer == "adam") == Version2Case(
        topology="tp2", optimizer="adam"
    )


def _followed_steps(text: str, folder: str) -> int:
    """Train a case; in how many steps this rank, as the root stage, has followed a step program to its end."""
    from unittest import mock

    from crossings.job import train_case

    from smp_runtime.pipeline.program.root_program import RootProgram

    followed, finish = [], RootProgram.finish

    def counted(program: RootProgram) -> None:
        followed.append(program.was_followed)
        finish(program)

    with mock.patch.object(RootProgram, "finish", counted):
        train_case(text, folder)
    return sum(followed)


def test_a_case_with_step_programs_has_steps_that_follow_one(ranks, tmp_path):
    case = Case(topology="pp2", microbatches=2, step_program=True)
    assert max(ranks(_followed_steps, 2, case.to_json(), str(tmp_path), init=False)) >= 4
