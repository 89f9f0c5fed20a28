"""The causal order of recorded tensors: which of two came first, and may be the cause of the other's error."""

from __future__ import annotations

from smp_estimator.numerics.recorded_run import TensorKey, Total, Totals, estimate_distance
from smp_records.numerics import GRADIENT, INPUT, NUMBERS_OF_CALL, OUTPUT, OUTPUT_GRADIENT, PHASES

#: Times that an error may have grown from one call of a module to the next.
_GROWN = 64.0


def time_by_calls(made: Totals, ordering: Totals, others: Totals) -> None:
    """Set the time of a module with several calls to that of its first call that differs.

    A module that runs between these calls may be the cause of the difference.
    """
    ours, theirs = _calls(ordering), _calls(others)
    for key, found in ours.items():
        if len(found) < 2 or key not in theirs:
            continue
        errors = []
        for call in found:
            # The calls of the other run may come in another order: the nearest one counts.
            distances = [estimate_distance(call.projections, other.projections) for other in theirs[key]]
            errors.append(min(distances) / (call.norm or 1.0))
        least = max(errors) / _GROWN
        for call, error in zip(found, errors, strict=True):
            if error >= least:
                made[key].time = call.time
                break


def _calls(totals: Totals) -> dict[TensorKey, list[Total]]:
    """Return the calls in time order, by module and output tensor."""
    found: dict[TensorKey, list[Total]] = {}
    for key, total in sorted(totals.items(), key=lambda item: item[1].time):
        if key.phase in (OUTPUT, OUTPUT_GRADIENT):
            found.setdefault(key._replace(nth=key.nth % NUMBERS_OF_CALL), []).append(total)
    return found


def common_keys_in_order(ordering: Totals, others: Totals) -> list[TensorKey]:
    """Return the keys that both runs have, in causal order: by the clock of the run with fewer stages."""
    forward: dict[str, float] = {}
    for key in sorted(ordering, key=lambda key: ordering[key].time):
        if key.phase == OUTPUT:
            forward.setdefault(key.name, float(len(forward)))

    def module_of(name: str) -> float:
        while name and name not in forward:
            name = name.rpartition(".")[0]
        return forward.get(name, -1.0)

    def place(key: TensorKey) -> tuple[int, float, str, int]:
        if key.phase in (OUTPUT, OUTPUT_GRADIENT, INPUT):
            within = ordering[key].time
        else:
            within = module_of(key.name.rpartition(".")[0]) * (-1.0 if key.phase == GRADIENT else 1.0)
        return PHASES.index(key.phase), within, key.name, key.nth

    return sorted(ordering.keys() & others.keys(), key=place)
