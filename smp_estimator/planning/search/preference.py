"""The preference among the clusters that fit: the smallest, the cheapest, or the fastest.

The last two go by the time of a step (:mod:`smp_estimator.planning.step_time`), and for each token: larger clusters read
more of them in a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from smp_config import ConfigError
from smp_config.errors import suggest
from smp_config.machine.instances import instance
from smp_estimator.planning.forecast import Verdict
from smp_estimator.planning.plan import Plan
from smp_estimator.planning.search.clusters import (
    MOST_INSTANCES,
    SHOWN,
    Ask,
    Cluster,
    current_types,
    least_count,
    smallest_cluster,
)
from smp_estimator.planning.search.heuristic_steps import TriedConfiguration, fitting_plans, has_room
from smp_estimator.planning.step_time import unknown_because

if TYPE_CHECKING:
    from smp_estimator.planning.request import Request

#: What ``prefer`` may be.
Preference = Literal["smallest", "cheapest", "fastest"]
PREFERENCES: tuple[str, ...] = get_args(Preference)


@dataclass(frozen=True)
class PreferredClusters:
    """Clusters in the order of a preference.

    Attributes:
        clusters: the best first, each type once.
        left_out: types on which the model may fit, but which cannot be compared, and why; in words.
    """

    clusters: tuple[Cluster, ...]
    left_out: tuple[str, ...]


def check_preference(prefer: str) -> str:
    """Return ``prefer`` if it is a known preference; raise ConfigError for another word."""
    if prefer not in PREFERENCES:
        raise ConfigError(
            f"prefer is {prefer!r}{suggest(str(prefer), PREFERENCES)}; clusters that fit are compared by their size, by what "
            f"a token costs, or by tokens per second: use one of {', '.join(PREFERENCES)}",
            code="SMP110",
        )
    return prefer


def fastest_step(steps: Iterable[TriedConfiguration]) -> TriedConfiguration | None:
    """Return the fitting configuration with the shortest step; None without any.

    One that offloads is returned only if all do. Copies of offloaded activations are not in its time, so that
    time is not compared with others.
    """
    fit = [step for step in steps if step.plan.verdict is Verdict.FITS and has_room(step.plan)]
    return min(
        fit, key=lambda step: (step.plan.request.parameters.offload_activations, _seconds(step.plan)), default=None
    )


def rank_clusters(
    ask: Ask, prefer: str, *, kind: str | None = None, count: int | None = None, up_to: int | None = None
) -> PreferredClusters:
    """Return the best clusters by price or by speed, one per type.

    Args:
        prefer: ``"cheapest"`` or ``"fastest"``.
        kind: clusters of this type only.
        count: clusters of so many instances only.
        up_to: most instances. Of each type the fewest instances that fit are tried, then twice as many, and so
            on. Without it: for the cheapest the fewest of each type, for the fastest no more than the smallest
            cluster of all needs.
    """

    def order(cluster: Cluster) -> tuple[float, ...]:
        return _order(cluster, prefer)

    names = [kind] if kind is not None else list(_types(ask))
    asked = list(_comparable(ask, prefer, names))
    comparable = [(least, name) for least, name, why in asked if why is None]
    most = count or up_to or MOST_INSTANCES
    if prefer == "fastest" and count is None and up_to is None:
        most = _fewest_of_all(ask, comparable)
    only_fewest = prefer == "cheapest" and up_to is None
    best: list[Cluster] = []
    for is_slow, bound, least, name in sorted(_bounds(ask, prefer, comparable, most)):
        if _are_settled(best, prefer, is_slow, bound):
            break
        found = list(_clusters(ask, name, least, most, count=count, only_fewest=only_fewest))
        if found:
            best.append(min(found, key=order))
            best.sort(key=order)
    return PreferredClusters(tuple(best[:SHOWN]), _left_out(asked))


def _are_settled(best: list[Cluster], prefer: str, is_slow: bool, bound: float) -> bool:
    """Return whether no cluster of this type, or of those after it in the order of bounds, can be among the best."""
    fast = [cluster for cluster in best if not cluster.is_slow]
    if len(fast) < SHOWN:
        return False
    return is_slow or bound >= _worth(fast[SHOWN - 1], prefer)


def _left_out(asked: list[tuple[int, str, str | None]]) -> tuple[str, ...]:
    """Return the reasons why types cannot be compared, each with the names of its types."""
    names_by_reason: dict[str, list[str]] = {}
    for _, name, why in asked:
        if why is not None:
            names_by_reason.setdefault(why, []).append(name)
    return tuple(f"{', '.join(names)}: {why}" for why, names in names_by_reason.items())


def _types(ask: Ask) -> Iterator[str]:
    """Yield one type per kind of GPUs and network: the one with the lowest price."""
    best: dict[tuple[object, ...], tuple[float, int, str]] = {}
    for known in current_types():
        try:
            price = ask(known.name, 1)[0].usd_per_hour or math.inf
        except ConfigError:
            continue  # fewer GPUs than processes were asked for
        key = (known.gpu, known.gpu_memory_bytes, known.gpus, known.efa, known.network_baseline_gbps)
        found = (price, known.host_memory_bytes, known.name)
        best[key] = min(best.get(key, found), found)
    yield from (name for _, _, name in best.values())


def _comparable(ask: Ask, prefer: str, names: Iterable[str]) -> Iterator[tuple[int, str, str | None]]:
    """Yield the least number of instances of each type, its name, and why it cannot be compared, or None."""
    for name in names:
        try:
            request, _ = ask(name, 1)
        except ConfigError:
            continue  # fewer GPUs than processes were asked for
        least = least_count(request)
        if least > MOST_INSTANCES:
            continue
        smallest = request if least == 1 else request.changed(instance_count=least)
        yield least, name, _not_comparable_because(smallest, prefer)


def _not_comparable_because(request: Request, prefer: str) -> str | None:
    why = unknown_because(request)
    lacks_price = prefer == "cheapest" and request.usd_per_hour is None
    if why is None and lacks_price:
        return "no price is known"
    return why


def _fewest_of_all(ask: Ask, comparable: list[tuple[int, str]]) -> int:
    """Return the number of instances of the cluster with the fewest."""
    fewest = MOST_INSTANCES
    for least, name in sorted(comparable):
        if least >= fewest:
            break
        cluster = smallest_cluster(ask, name, 6)
        fewest = min(fewest, cluster.instance_count if cluster else fewest)
    return fewest


def _bounds(
    ask: Ask, prefer: str, comparable: list[tuple[int, str]], most: int
) -> Iterator[tuple[bool, float, int, str]]:
    """Yield the worth that no cluster of a type can exceed: arithmetic alone, on every GPU, without recomputation.

    Each item begins with whether all clusters of the type are slow (several instances without EFA); these come
    last.
    """
    for least, name in comparable:
        if least > most:
            continue
        request, _ = ask(name, 1)
        known = instance(name)
        is_slow = least > 1 and known is not None and not known.efa
        yield is_slow, _arithmetic_worth(request, prefer, most), least, name


def _arithmetic_worth(request: Request, prefer: str, most: int) -> float:
    plain = Plan.of(request.changed(activation_checkpointing=None))
    if plain.time is None:
        raise AssertionError(f"{request.instance_type} cannot be compared, and was not left out")
    seconds, tokens = plain.time.arithmetic, plain.batches.tokens
    if prefer == "cheapest":
        return (request.usd_per_hour or math.inf) * seconds / tokens
    return -most * tokens / seconds


def _clusters(ask: Ask, name: str, least: int, most: int, *, count: int | None, only_fewest: bool) -> Iterator[Cluster]:
    """Yield clusters of one type that fit, each with its fastest configuration."""
    if count is None:
        counts = _tried_counts(ask, name, most, only_fewest=only_fewest)
    elif count < least:
        return
    else:
        counts = [count]
    for each in counts:
        try:
            request, samples = ask(name, each)
        except ConfigError:
            continue  # fewer GPUs than processes were asked for
        step = fastest_step(fitting_plans(request, samples))
        if step is not None and step.plan.time is not None:
            yield Cluster(step)


def _tried_counts(ask: Ask, name: str, most: int, *, only_fewest: bool) -> list[int]:
    """Return the numbers of instances of one type to try, the fewest that fit first."""
    first = smallest_cluster(ask, name, 6)
    if first is None or first.instance_count > most:
        return []
    if only_fewest:
        return [first.instance_count]
    return _doubled(first.instance_count, most)


def _doubled(first: int, most: int) -> list[int]:
    """Return first, 2 · first, 4 · first, … and ``most`` itself."""
    counts = [first]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == most else [*counts, most]


def _seconds(plan: Plan) -> float:
    return math.inf if plan.time is None else plan.time.total


def _worth(cluster: Cluster, prefer: str) -> float:
    """Return the sort key, less is better: price of a token (times a constant), or negative tokens per second."""
    time, price = cluster.plan.time, cluster.plan.request.usd_per_hour
    if time is None:
        return math.inf
    if prefer == "cheapest":
        return (price or math.inf) * cluster.instance_count / time.tokens_per_second
    return -time.tokens_per_second


def _order(cluster: Cluster, prefer: str) -> tuple[float, ...]:
    """Return the sort key of a cluster; clusters with a fast network come first, as everywhere."""
    return (cluster.is_slow, _worth(cluster, prefer), *cluster.size)
