"""Models that a case of version 2 trains: those of version 1 whose ranks gather the same parameters, and mixtures of experts."""

from __future__ import annotations

from crossings.nets import NETS, Net
from support.models.version2_mixtures import make_listed, make_tabled

#: Those whose samples decide which parameters are gathered, which write into weights that are gathered, and which need ranks that
#: share sequences out.
_WITHOUT = ("forked", "clamped", "mixture", "follower", "flexible", "ranges")

_TOKENS = NETS["tied"]

VERSION2_NETS: dict[str, Net] = {
    **{name: net for name, net in NETS.items() if name not in _WITHOUT},
    "listed": Net(make_listed, _TOKENS.batch, _TOKENS.loss, "blocks", varies=True),
    "tabled": Net(make_tabled, _TOKENS.batch, _TOKENS.loss, "blocks", varies=True),
}


def find_net(name: str) -> Net:
    """Return the model of a case of either version."""
    return NETS[name] if name in NETS else VERSION2_NETS[name]
