"""The hosts of a job while it runs: which are lost, and how the job goes on with those that are left."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from smp_config.shrink_degrees import describe_difference
from smp_config.topology import Group
from smp_launch.supervision.supervise import write_own_line

if TYPE_CHECKING:
    from smp_launch.machine.locked_folders import StatusDir
    from smp_launch.mpirun.job import Job
    from smp_launch.watch.other_hosts import OtherHost


class OtherHosts(Protocol):
    """All hosts of a job but the leader.

    Attributes:
        agent: the command with which mpirun reaches a host; empty if all hosts are this machine.
        lost_when: when :meth:`lost` first named a host, in seconds of ``time.time()``.
    """

    agent: str
    lost_when: float | None

    @property
    def pids(self) -> Collection[int]:
        """Return the child processes of the launcher that hold connections to the hosts."""
        ...

    def lost(self) -> list[str]:
        """Return the hosts that are gone."""
        ...

    def drop(self, hosts: Sequence[str]) -> None:
        """Go on without these hosts."""
        ...

    def ranks(self, ranks_of: Mapping[str, Collection[int]]) -> Sequence[OtherHost]:
        """Return, for each host, the ranks that the leader cannot see directly, for the watch over them."""
        ...


@dataclass
class Neighbours:
    """Hosts that are simulated on this machine. A host is gone if its launcher was there and has ended."""

    hosts: Sequence[str]
    status: StatusDir
    agent: str = ""
    lost_when: float | None = None
    pids: Collection[int] = ()
    _seen: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, job: Job, status: StatusDir) -> Neighbours | None:
        """Return the neighbours of a job, or None if the job would not go on without one of them."""
        if not job.restarts or not job.layout.simulated:
            return None
        hosts = [host for host in (*job.layout.hosts, *job.spares) if host != job.layout.leader]
        return cls(hosts, status) if hosts else None

    def lost(self) -> list[str]:
        """See :class:`OtherHosts`."""
        here = {host for host in self.hosts if self.status.is_followed_by(host)}
        self._seen |= here
        # A host that has not come yet is not lost.
        gone = self._seen - here
        lost = [host for host in self.hosts if host in gone]
        if lost and self.lost_when is None:
            self.lost_when = time.time()
        return lost

    def drop(self, hosts: Sequence[str]) -> None:
        """See :class:`OtherHosts`."""
        self.hosts = [host for host in self.hosts if host not in hosts]
        self.lost_when = None

    def ranks(self, ranks_of: Mapping[str, Collection[int]]) -> Sequence[OtherHost]:
        """Return no ranks: all of them are children of this launcher."""
        return ()


@dataclass
class RemainingHosts:
    """A job as it is after the hosts that were lost so far.

    Attributes:
        memory: the folder in shared memory with that of each simulated host; None without.
    """

    job: Job
    others: OtherHosts | None
    memory: str | None

    def job_now(self) -> Job:
        """Return the job for the next start, without the hosts that are gone, and log how it goes on."""
        if self.others is None:
            return self.job
        gone = self.others.lost()
        # Asked before drop(), which forgets them.
        lost = lost_of(self.job, self.others)
        now = self.job.without(gone) if gone else None
        if now is None:
            return self.job  # if the job cannot go on, the next start reports why
        former, self.job = self.job, now
        self.others.drop(gone)
        # On one machine that plays several hosts, a lost host's memory goes with it.
        if self.memory is not None and now.layout.simulated:
            for host in gone:
                shutil.rmtree(Path(self.memory, host), ignore_errors=True)
        if lost:
            write_own_line(f"host {', '.join(lost)} is lost; {_going_on(former, now)}")
        return now

    def forget_failure(self) -> None:
        """See :meth:`Job.forget_failure`."""
        self.job.forget_failure()


def lost_of(job: Job, others: OtherHosts | None) -> list[str]:
    """Return the lost hosts on which a job has ranks."""
    if others is None:
        return []
    return [host for host in others.lost() if host in job.layout.hosts]


def _going_on(former: Job, now: Job) -> str:
    """Describe how a job goes on after it lost a host."""
    came = [host for host in now.layout.hosts if host not in former.layout.hosts]
    if came:
        instead = f"{', '.join(came)}, which was spare, takes its place"
        if now.layout.world_size == former.layout.world_size:
            return instead
        return f"{instead}, and {_smaller(former, now)}"
    return _smaller(former, now)


def _smaller(former: Job, now: Job) -> str:
    told = f"the job goes on with {now.layout.describe()} instead of {former.layout.world_size}"
    if former.parameters is None or now.parameters is None:
        return told
    changed = describe_difference(former.parameters, now.parameters)
    replicas = [
        job.parameters.topology(job.layout.world_size).size(Group.BATCH_RDP)
        for job in (former, now)
        if job.parameters is not None
    ]
    return f"{told}: {changed or 'the same degrees'}, replicas {replicas[0]} → {replicas[1]}"
