"""The all-gather of SMDDP: its automatic use, and its buffers (two variables, their rules, their minimum sizes).

Source of the supported configurations, defaults and rules: the public pages on SMDDP Collectives for sharded data
parallelism.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_config.errors import ConfigError, show_value
from smp_config.machine.collective_backends import SMDDP, chosen_backend

if TYPE_CHECKING:
    from smp_config.parameters import ModelParallelParameters

#: Name of the backend of ``torch.distributed``.
BACKEND = SMDDP

#: Variables with the sizes of the data parallel library's buffers.
SCRATCH_VARIABLE = "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES"
SORT_VARIABLE = "SMDDP_AG_SORT_BUFFER_SIZE_BYTES"

#: Every size is a multiple of this many bytes.
BUFFER_GRAIN = 8192

_MOST_BYTES = 2**50

#: What the buffers have if their variables are not set.
DEFAULT_SCRATCH_BYTES = 16 * 1024 * 1024
DEFAULT_SORT_BYTES = 128 * 1024 * 1024

#: Pieces of a shard begin at multiples of this many bytes.
_PIECE_GRAIN = 64

#: More pieces of one shard would cost more time to begin than phases save.
_MOST_PIECES = 64

#: GPUs of the node that the documented rule (sort buffer ≥ degree · input / 8) was written for.
_DOCUMENTED_RANKS_PER_NODE = 8


def is_chosen(parameters: ModelParallelParameters, instance_type: str | None, hosts: int) -> bool:
    """Return whether a job uses SMDDP's collectives: by name, which works anywhere, or automatically."""
    return chosen_backend(parameters, hosts, instance_type) == BACKEND


def host_rows(host_of: Sequence[Hashable]) -> tuple[tuple[int, ...], ...] | str:
    """Return the positions of each host's ranks, equally many per host.

    If an all-gather in phases is impossible or useless, the result is the reason instead.

    Args:
        host_of: by position in the group, the host of that rank.
    """
    hosts: dict[Hashable, list[int]] = {}
    for number, name in enumerate(host_of):
        hosts.setdefault(name, []).append(number)
    rows = tuple(tuple(ranks) for ranks in hosts.values())
    if len(rows) == 1:
        return f"all {len(host_of)} ranks of the group are on one host, {host_of[0]}"
    widths = {len(row) for row in rows}
    if len(widths) > 1:
        shown = ", ".join(f"{len(ranks)} on {name}" for name, ranks in hosts.items())
        return f"its hosts have different numbers of the group's ranks: {shown}"
    if len(rows) == len(host_of):
        return f"each of its {len(rows)} hosts has one rank of the group, so nothing would be sent twice"
    return rows


@dataclass(frozen=True)
class BufferSizes:
    """Sizes in bytes.

    Attributes:
        scratch: holds the input of one all-gather on its way to other nodes.
        sort: holds what arrives from other nodes before it is put in order.
    """

    scratch: int = DEFAULT_SCRATCH_BYTES
    sort: int = DEFAULT_SORT_BYTES

    @classmethod
    def from_environment(cls, *sources: Mapping[str, str]) -> BufferSizes:
        """Read both variables; of several sources (``-x`` options, the environment) the first that has one wins.

        Raises:
            ConfigError: a value that is not a positive multiple of 8192.
        """
        return cls(
            scratch=_size(SCRATCH_VARIABLE, DEFAULT_SCRATCH_BYTES, sources),
            sort=_size(SORT_VARIABLE, DEFAULT_SORT_BYTES, sources),
        )

    def to_environment(self) -> dict[str, str]:
        """Return both variables as the ranks get them."""
        return {SCRATCH_VARIABLE: str(self.scratch), SORT_VARIABLE: str(self.sort)}

    def fallback_reason(self, input_bytes: int, sharding_degree: int, implementation_bytes: int = 0) -> str | None:
        """Return why an all-gather must use the plain backend, with all sizes; None if the buffers suffice.

        Args:
            input_bytes: the input of one rank.
            implementation_bytes: bytes that the implementation itself puts into the sort buffer on this layout of ranks;
                the larger of this and the documented rule decides.
        """
        if input_bytes > self.scratch:
            return (
                f"the input of {input_bytes} bytes is larger than {SCRATCH_VARIABLE}={self.scratch}; "
                f"{_multiple_at_least(input_bytes)} would hold it"
            )
        documented = -(-sharding_degree * input_bytes // _DOCUMENTED_RANKS_PER_NODE)
        needed = max(documented, implementation_bytes)
        if self.sort < needed:
            return (
                f"the gathered data needs {needed} bytes ({input_bytes} bytes of input, sharding degree "
                f"{sharding_degree}), more than {SORT_VARIABLE}={self.sort}; {_multiple_at_least(needed)} would hold it"
            )
        return None

    def pieces(self, input_bytes: int, hosts: int, ranks_per_host: int) -> int:
        """Return into how many pieces sharded data parallelism splits a shard, so that each fits; 0 if too many.

        A shard that fits the buffers is sent whole. A piece of a shard is not a block of the whole tensor. So the sort
        buffer also holds the data that a host's ranks exchange, before it is moved to its places.

        Args:
            input_bytes: the shard.
            hosts: number of hosts of the group's ranks.
            ranks_per_host: of the group.
        """
        ranks = hosts * ranks_per_host
        if self.fallback_reason(input_bytes, ranks, hosts * input_bytes) is None:
            return 1
        # What pieces_reason asks of each buffer is this the other way round.
        most = min(self.scratch, self.sort * _DOCUMENTED_RANKS_PER_NODE // ranks, self.sort // (hosts + ranks_per_host))
        most = most // _PIECE_GRAIN * _PIECE_GRAIN
        pieces = -(-input_bytes // most) if most else 0
        return pieces if pieces <= _MOST_PIECES else 0

    def pieces_reason(self, input_bytes: int, hosts: int, ranks_per_host: int) -> str | None:
        """Return why the plain backend must gather a shard that may go in pieces, with sufficient sizes.

        The result is None if it need not.

        Args:
            input_bytes, hosts, ranks_per_host: as for :meth:`pieces`.
        """
        if self.pieces(input_bytes, hosts, ranks_per_host):
            return None
        ranks = hosts * ranks_per_host
        piece = -(-input_bytes // (_MOST_PIECES * _PIECE_GRAIN)) * _PIECE_GRAIN
        sort = max(-(-piece * ranks // _DOCUMENTED_RANKS_PER_NODE), piece * (hosts + ranks_per_host))
        small = []
        for variable, size, needed in ((SCRATCH_VARIABLE, self.scratch, piece), (SORT_VARIABLE, self.sort, sort)):
            if size < needed:
                small.append((f"{variable}={size}", f"{variable}={_multiple_at_least(needed)}"))
        return (
            f"the shard of {input_bytes} bytes would take more than {_MOST_PIECES} pieces with "
            f"{' and '.join(now for now, _ in small)} ({hosts} hosts with {ranks_per_host} of its ranks each); "
            f"{' and '.join(then for _, then in small)} would do"
        )

    def piece_bytes(self, input_bytes: int, hosts: int, ranks_per_host: int) -> int:
        """Return the bytes of each of these pieces (at most that for the last one); 0 if there are none."""
        pieces = self.pieces(input_bytes, hosts, ranks_per_host)
        if pieces < 2:
            return input_bytes * pieces
        return -(-input_bytes // (pieces * _PIECE_GRAIN)) * _PIECE_GRAIN


def _size(variable: str, default: int, sources: tuple[Mapping[str, str], ...]) -> int:
    given = next((source[variable] for source in sources if variable in source), None)
    if given is None:
        return default
    try:
        size = int(str(given).strip())
    except ValueError:
        raise ConfigError(
            f"{variable} is {show_value(given)}, not a whole number; it is a size in bytes and must be a multiple of "
            f"{BUFFER_GRAIN}; the default is {default}",
            code="SMP106",
        ) from None
    if size > _MOST_BYTES:
        raise ConfigError(
            f"{variable} is {show_value(given)}; it is a size in bytes, and no memory has so many: set it to a multiple of "
            f"{BUFFER_GRAIN} of at most {_MOST_BYTES} (the default is {default})",
            code="SMP106",
        )
    if size >= BUFFER_GRAIN and size % BUFFER_GRAIN == 0:
        return size
    below = size // BUFFER_GRAIN * BUFFER_GRAIN
    nearest = [str(value) for value in (below, below + BUFFER_GRAIN) if value >= BUFFER_GRAIN] or [str(BUFFER_GRAIN)]
    why = f"{size} = {size // BUFFER_GRAIN} × {BUFFER_GRAIN} + {size % BUFFER_GRAIN}" if size > 0 else f"{size} ≤ 0"
    raise ConfigError(
        f"{variable} is {size}; it must be a positive multiple of {BUFFER_GRAIN}, and {why}; "
        f"set it to {' or '.join(nearest)} (the default is {default})",
        code="SMP106",
    )


def _multiple_at_least(size: int) -> int:
    return -(-size // BUFFER_GRAIN) * BUFFER_GRAIN
