"""Pictures of a topology's groups, as text and as PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from smp_config import ConfigError, Group, Topology
from smp_config.errors import PackageMissing
from smp_config.machine.extras import install_command
from smp_estimator.figures.placement import picture_title

_NAMES = {
    Group.PP: ("PPG", "pipeline parallelism"),
    Group.TP: ("TPG", "tensor parallelism"),
    Group.RDP: ("RDPG", "reduced data parallelism"),
    Group.CONTEXT: ("CPG", "context parallelism"),
    Group.SHARD: ("SDPG", "sharded data parallelism"),
    Group.REPLICA: ("REPG", "replication of a shard"),
    Group.DP: ("DPG", "data parallelism"),
    Group.MP: ("MPG", "model replica"),
}

#: The order in which groups are shown. Of two kinds with the same members, the first is shown.
_SHOWN = (
    Group.TP,
    Group.PP,
    Group.CONTEXT,
    Group.SHARD,
    Group.DP,
    Group.RDP,
    Group.REPLICA,
    Group.MP,
)

#: Ranks of one group are listed in full up to this many.
_LISTED = 16


def shown_groups(topology: Topology) -> list[Group]:
    """Return the kinds of groups worth showing.

    Each has more than one rank but not all of them, and no two kinds have the same members.
    """
    found: list[Group] = []
    seen: list[list[list[int]]] = []
    for group in _SHOWN:
        members = topology.groups(group)
        if 1 < topology.size(group) < topology.world_size and members not in seen:
            found.append(group)
            seen.append(members)
    return found or [Group.DP]


def group_text(topology: Topology) -> Any:
    """Return the groups as a rich table: one row per group, global ranks ascending."""
    degrees = (
        f"{topology.world_size} ranks: pipeline {topology.pipeline} × tensor {topology.tensor} × reduced data parallel "
        f"{topology.rdp_size}, {_context(topology)}sharded over {topology.sharded}, "
        f"replicated {topology.size(Group.REPLICA)} times, placement {topology.placement}"
    )
    table = Table()
    table.add_column("group", no_wrap=True)
    table.add_column("global ranks")
    for group in shown_groups(topology):
        prefix, words = _NAMES[group]
        table.add_section()
        table.add_row(Text(f"{words}: {topology.size(group)} ranks each", style="bold"), "")
        for number, members in enumerate(topology.groups(group)):
            table.add_row(f"{prefix}{number}", _ranks(members))
    return Lines(Text(degrees), table)


def _context(topology: Topology) -> str:
    return f"sequences shared out over {topology.context}, " if topology.context > 1 else ""


def _ranks(members: list[int]) -> str:
    if len(members) <= _LISTED:
        return ", ".join(map(str, members))
    half = _LISTED // 2
    return f"{', '.join(map(str, members[:half]))}, … {', '.join(map(str, members[-half:]))} ({len(members)} ranks)"


def save_png(topology: Topology, path: str | Path, *, per_node: int = 8) -> Path:
    """Draw the tensor parallel and sharding groups (or whatever groups there are), one panel each.

    Each square is a rank with its number, each row a node. Groups that hold the same part of the model in different
    replicas share a colour and are filled differently, as in the published figures of sharded data parallelism with
    tensor parallelism.

    Args:
        topology: what to draw; up to 512 ranks.
        per_node: ranks in a row.

    Raises:
        ConfigError: too many ranks for a picture.
        PackageMissing: matplotlib is not installed.
    """
    if topology.world_size > 512:
        raise ConfigError(
            f"{topology.world_size} ranks are too many for one picture; squares would be smaller than their numbers: draw "
            "at most 512 ranks (the groups repeat), or use the text",
            code="SMP110",
        )
    if per_node < 1:
        raise ConfigError(
            f"per_node is {per_node}; each row of the picture is a node of at least 1 rank: set it to 8", code="SMP110"
        )
    try:
        # No pyplot: its global state and its choice of a screen are not needed for a file.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PackageMissing(f"drawing needs matplotlib ({error}); {install_command('plots')}") from None

    kinds = shown_groups(topology)[:4]
    rows = -(-topology.world_size // per_node)
    wide = min(2, len(kinds))
    high = -(-len(kinds) // wide)
    figure = Figure(figsize=(0.62 * per_node * wide + 1.2, (0.62 * rows + 0.9) * high + 0.6), dpi=120)
    FigureCanvasAgg(figure)
    for panel, group in enumerate(kinds):
        axes = figure.add_subplot(high, wide, panel + 1)
        _draw(axes, topology, group, per_node, rows)
    figure.suptitle(picture_title(topology, per_node), fontsize=10)
    figure.tight_layout()
    target = Path(path)
    figure.savefig(target, format="png")
    return target


def group_appearance(topology: Topology, group: Group, members: list[int]) -> tuple[int, int]:
    """Return a group's color and fill pattern as numbers counted from 0.

    Groups with the same color hold the same part of the model; the fill pattern is the replica's number. If a kind's groups are
    not replicas of one another, each group has its own color.
    """
    groups = topology.groups(group)
    parts = [_part(topology, group, other) for other in groups]
    own_part = _part(topology, group, members)
    if own_part is None or None in parts:
        return groups.index(members), 0
    known = sorted({part for part in parts if part is not None})
    replica = topology.coordinates(members[0]).rdp // topology.sharded
    return known.index(own_part), replica


def _part(topology: Topology, group: Group, members: list[int]) -> tuple[int, int] | None:
    """Return the part of the model's state that a group holds, or None if groups of this kind hold no single part."""
    at = topology.coordinates(members[0])
    shard = at.rdp % topology.sharded
    return {
        Group.TP: (at.pp, shard),
        Group.SHARD: (at.pp, at.tp),
        Group.PP: (at.tp, shard),
        Group.MP: (shard, 0),
    }.get(group)


def _draw(axes: Any, topology: Topology, group: Group, per_node: int, rows: int) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    colours, hatches = colormaps["tab20"], ("", "///", "...", "xxx", "\\\\\\", "++", "oo", "**")
    prefix, words = _NAMES[group]
    for number, members in enumerate(topology.groups(group)):
        colour, replica = group_appearance(topology, group, members)
        for rank in members:
            row, column = divmod(rank, per_node)
            axes.add_patch(
                Rectangle(
                    (column + 0.06, row + 0.06),
                    0.88,
                    0.88,
                    facecolor=colours(colour % 20),
                    hatch=hatches[replica % len(hatches)],
                    edgecolor="white" if replica else "black",
                    linewidth=0.6,
                )
            )
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6}
            label = f"{rank}\n{prefix}{number}"
            axes.text(column + 0.5, row + 0.5, label, ha="center", va="center", fontsize=5.5, bbox=box)
    axes.set_xlim(0, per_node)
    axes.set_ylim(rows, 0)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([row + 0.5 for row in range(rows)], [f"node {row}" for row in range(rows)], fontsize=6)
    axes.set_title(f"{words}\n{len(topology.groups(group))} groups of {topology.size(group)}", fontsize=8)
