"""What is expected to be used next."""

from __future__ import annotations

from smp_runtime.activations.load_order import RegionKey, Tape, TapeEntry


def key(microbatch, number, path=()):
    return RegionKey((microbatch, path), number)


def play(tape, entries, actions=None, order=None):
    """Run a step; what was coming after each entry, among the uses that are open then."""
    tape.begin_step()
    live, coming = [], []
    for index, entry in enumerate(entries):
        live.append(entry.key) if entry.kind == "F" else live.remove(entry.key)
        tape.note(entry, None if actions is None else actions[index], order)
        coming.append([found for found in tape.coming(live) if found in live])
    return coming


def step(microbatches, regions):
    """One microbatch after the other."""
    entries = []
    for microbatch in range(microbatches):
        entries += [TapeEntry("F", key(microbatch, number)) for number in range(regions)]
        entries += [TapeEntry("B", key(microbatch, number)) for number in reversed(range(regions))]
    return entries


def test_the_second_step_knows_what_comes():
    tape = Tape(horizon=2)
    play(tape, step(2, 3))
    coming = play(tape, step(2, 3))
    assert tape.is_followed
    # F0 F1 F2 B2 B1 B0 of the first microbatch
    second, last = key(0, 1), key(0, 2)
    assert coming[:6] == [[], [], [last, second], [second, key(0, 0)], [key(0, 0)], []]


def test_without_a_record_the_oldest_microbatch_and_the_last_region_come_first():
    tape = Tape(horizon=3)
    live = [key(0, 0), key(0, 1), key(1, 0), key(1, 1)]
    assert tape.coming(live) == [key(0, 1), key(0, 0), key(1, 1)]


def test_a_step_that_goes_another_way_is_noticed():
    tape = Tape(horizon=1)
    play(tape, step(1, 3))
    play(tape, step(1, 2))
    assert not tape.is_followed
    play(tape, step(1, 2))
    assert tape.is_followed


def test_a_planned_order_rearranges_the_record():
    forward = [TapeEntry("F", key(m, 0, (m,))) for m in range(2)]
    backward = [TapeEntry("B", key(m, 0, (m,))) for m in range(2)]
    tape = Tape(horizon=4)
    play(tape, forward + backward, ["F0", "F1", "B0", "B1"], None)
    turned = [forward[0], backward[0], forward[1], backward[1]]
    coming = play(tape, turned, ["F0", "B0", "F1", "B1"], ["F0", "B0", "F1", "B1"])
    assert tape.is_followed
    assert coming[0] == [key(0, 0, (0,))]


def test_evaluation_between_training_steps_is_not_recorded():
    tape = Tape(horizon=1)
    play(tape, step(1, 2))
    play(tape, [])
    play(tape, [entry for entry in step(1, 2) if entry.kind == "F"])
    play(tape, step(1, 2))
    assert tape.is_followed
