"""Ranks on their hosts, with their part of the model: squares in SVG, one row per host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from smp_config import Coordinates, Group, Topology
from smp_estimator.figures.svg import box, colour, ink_on, legend, picture, text

#: Units of a square with its gap, and the room for a host's name.
_WIDE, _HIGH, _NAMES = 50, 36, 62

#: Hosts beyond these repeat the pattern, and are described in words.
_MOST_HOSTS = 8

#: Squares of more ranks in a row would be smaller than their numbers; the rest of a host goes into the next row.
_MOST_IN_A_ROW = 16

#: Of larger jobs the groups are not looked up, which takes their whole grid.
_MOST_NAMED = 4096

#: Colours that are explained one by one.
_MOST_EXPLAINED = 4

_GROUPS = {
    Group.PP: "pipeline",
    Group.TP: "tensor parallel",
    Group.SHARD: "sharded",
    Group.CONTEXT: "context parallel",
    Group.DP: "data parallel",
}


@dataclass(frozen=True)
class Placement:
    """The ranks of a job on its hosts; a notebook shows it as a picture.

    Attributes:
        topology: the degrees of the job.
        per_host: ranks of a host.
    """

    topology: Topology
    per_host: int

    @property
    def title(self) -> str:
        """Return ``"32 ranks on 4 nodes: tensor parallel over 4, sharded over 4, 2 replicas of each shard"``."""
        return picture_title(self.topology, self.per_host)

    def _repr_html_(self) -> str:
        hosts = -(-self.topology.world_size // self.per_host)
        columns = min(self.per_host, _MOST_IN_A_ROW, self.topology.world_size)
        rows = -(-self.per_host // columns)
        axes = _axes(self.topology)
        parts = []
        for rank in range(min(self.topology.world_size, self.per_host * _MOST_HOSTS)):
            host, at = divmod(rank, self.per_host)
            row, column = divmod(at, columns)
            x, y = _NAMES + column * _WIDE, 28 + (host * rows + row) * _HIGH
            if at == 0:
                parts.append(text(4, y + 20, f"host {host}", size=11))
            parts += self._square(rank, x, y, axes)
        foot = 28 + min(hosts, _MOST_HOSTS) * rows * _HIGH + 14
        if hosts > _MOST_HOSTS:
            parts.append(text(_NAMES, foot, f"… {hosts - _MOST_HOSTS} more hosts of the same kind", size=11))
            foot += 18
        parts += self._explained(foot, axes)
        return picture(self.title, foot + 26, parts, max(_NAMES + columns * _WIDE + 4, 560))

    def _square(self, rank: int, x: float, y: float, axes: dict[str, int]) -> Iterator[str]:
        found = _parts_of(self.topology, self.topology.coordinates(rank))
        shown = [name for name, size in axes.items() if size > 1]
        groups = [
            f"{words} group {', '.join(map(str, self.topology.group_of(group, rank)))}"
            for group, words in _GROUPS.items()
            if 1 < self.topology.size(group) <= _MOST_IN_A_ROW and self.topology.world_size <= _MOST_NAMED
        ]
        where = ", ".join(f"{name} {found[name]}" for name in shown)
        fill = colour(found[shown[0]] if shown else 0)
        yield box(x, y, _WIDE - 4, _HIGH - 4, fill, "; ".join([f"rank {rank}: {where}", *groups]))
        yield text(x + (_WIDE - 4) / 2, y + 15, str(rank), anchor="middle", ink=ink_on(fill))
        below = " ".join(f"{name[0]}{found[name]}" for name in shown[1:])
        yield text(x + (_WIDE - 4) / 2, y + 28, below, size=9, anchor="middle", ink=ink_on(fill))

    def _explained(self, y: float, axes: dict[str, int]) -> list[str]:
        shown = [name for name, size in axes.items() if size > 1]
        if not shown:
            return []
        first = shown[0]
        if axes[first] <= _MOST_EXPLAINED:
            parts = legend(y, [(colour(number), f"{first} {number}") for number in range(axes[first])])
        else:
            parts = [text(4, y, f"colour: {first}, from 0 to {axes[first] - 1}", size=11)]
        if len(shown) > 1:
            parts.append(
                text(4, y + 18, f"below the rank: {', '.join(f'{name[0]} {name}' for name in shown[1:])}", size=11)
            )
        return parts


def picture_title(topology: Topology, per_node: int) -> str:
    """Return ``"32 ranks on 4 nodes: tensor parallel over 4, sharded over 4, 2 replicas of each shard"``."""
    nodes, ranks = -(-topology.world_size // per_node), topology.world_size
    over = []
    if topology.pipeline > 1:
        over.append(f"pipeline of {topology.pipeline} stages")
    if topology.tensor > 1:
        over.append(f"tensor parallel over {topology.tensor}")
    if topology.sharded > 1:
        over.append(f"sharded over {topology.sharded}")
    divides_model = bool(over)
    if topology.context > 1:
        over.append(f"sequences shared out over {topology.context}")
    what = "each part" if divides_model else "the model"
    if topology.sharded > 1:
        what = "each shard"
    over.append(_counted(topology.size(Group.REPLICA), f"replica{{}} of {what}"))
    return f"{_counted(ranks, 'rank{}')} on {_counted(nodes, 'node{}')}: {', '.join(over)}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what.format('s' if count != 1 else '')}"


def _axes(topology: Topology) -> dict[str, int]:
    """Return, by name, the number of parts into which each axis divides the model, its batch or its state."""
    return {
        "stage": topology.pipeline,
        "tensor rank": topology.tensor,
        "part": topology.sharded,
        "replica": topology.size(Group.REPLICA),
    }


def _parts_of(topology: Topology, at: Coordinates) -> dict[str, int]:
    replica, shard = divmod(at.rdp, topology.sharded)
    return {"stage": at.pp, "tensor rank": at.tp, "part": shard, "replica": replica}
