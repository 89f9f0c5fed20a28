"""A rank of a real job, counted like one of a rehearsal: ``counted_rank.py FOLDER STEPS INSTANCE train.py …``.

INSTANCE is the type by whose stated rates its pipeline is planned, as in a rehearsal; ``-``: from what its work really takes.
"""

import runpy
import sys
from pathlib import Path

import torch  # noqa: F401 - first: it loads parts of the runtime itself

from smp_records.rate_card import RateCard
from smp_runtime.comm.collectives import TorchCollectives
from smp_runtime.comm.control import connect
from smp_runtime.job import session as sessions
from smp_runtime.pipeline.transport import tensor_channels
from smp_tools.rehearsal.counters import Counters, RehearsalOver


class CountedChannel(tensor_channels.InlineChannel):
    """Sends as ever, and counts."""

    def __init__(self, links, peer, device):
        super().__init__(device)
        self._links, self._peer = links, peer

    def inline(self, tensor):
        self._links.add(self._peer, tensor.nbytes)
        return super().inline(tensor)


def main(folder, steps, instance, script, *words):
    counters = Counters(int(steps), None, None if instance == "-" else RateCard.of_instance(instance))
    sessions.joining.append(lambda parameters: (connect(), counters.counted(TorchCollectives())))

    def begin(session):
        ranks = session.ranks
        counters.follow(session, lambda members: 1)
        counters.links.reaches(lambda rank: ranks.topology.coordinates(rank).pp, lambda rank: True)
        tensor_channels.instead.append(lambda peer: CountedChannel(counters.links, peer, ranks.device))

    sessions.at_init.append(begin)
    sys.argv = [script, *words]
    counters.start()
    try:
        runpy.run_path(script, run_name="__main__")
    except RehearsalOver:
        pass
    ranks = sessions.current_session().ranks
    report = counters.report(ranks.topology.coordinates(ranks.rank).pp, ranks.rank, 1)
    Path(folder, f"rank-{ranks.rank}.json").write_text(report.model_dump_json())
    sessions.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
