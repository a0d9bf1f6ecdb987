"""Which ranks share a host."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


class Layout:
    """The ranks of a communicator on its hosts, in any distribution; hosts are ordered by their lowest rank.

    Attributes:
        hosts: the ranks of each host, ascending. The first is the host's leader.
        rank, size: of the communicator.
        host: the number of this rank's host. local: this rank's number within it.
        members: the ranks of this host. leaders: one rank of each host.
        order: all ranks, host after host. elsewhere: those of the other hosts.
        largest, smallest: ranks of the largest and of the smallest host.
    """

    def __init__(self, hosts: Sequence[Sequence[int]], rank: int) -> None:
        self.hosts = tuple(tuple(ranks) for ranks in hosts)
        self.rank = rank
        self.host_of = {r: h for h, ranks in enumerate(self.hosts) for r in ranks}
        self.local_of = {r: i for ranks in self.hosts for i, r in enumerate(ranks)}
        self.size = len(self.host_of)
        self.host, self.local = self.host_of[rank], self.local_of[rank]
        self.members = self.hosts[self.host]
        self.leaders = tuple(ranks[0] for ranks in self.hosts)
        self.order = tuple(r for ranks in self.hosts for r in ranks)
        self.largest, self.smallest = max(map(len, self.hosts)), min(map(len, self.hosts))
        self.elsewhere = tuple(r for r in range(self.size) if self.host_of[r] != self.host)

    @classmethod
    def by(cls, places: Sequence[Hashable], rank: int) -> Layout:
        """Makes the layout of ranks of which those with equal `places` share a host."""
        hosts: dict[Hashable, list[int]] = {}
        for r, place in enumerate(places):
            hosts.setdefault(place, []).append(r)
        return cls(list(hosts.values()), rank)

    @property
    def is_leader(self) -> bool:
        return self.local == 0
