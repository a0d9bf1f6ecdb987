"""What happens in a round: everything of it but the moment within a step follows from its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.chaos.program import CREATION, Spec

STEPS = 17  # two splits among them
PATIENT = 60.0  # seconds: the timeout of operations where none is meant to pass
SHORT = 10.0  # and where one is, after far more than any needs that nothing happens to
LONGEST_DELAY = 0.006  # seconds into a step
BACKENDS = ("shm", "gloo", "hosts")
LINKED = ("gloo", "hosts")  # those that reach another host

_WHILE_COMING = ("no descriptors", "no memory")  # may strike at the creation, too


@dataclass(frozen=True)
class Fault:
    """`error`: what the ranks get that live; `within`: seconds until the last one has it, far more than it
    takes; `backends` that it can happen to.
    """

    what: str
    error: str
    within: float
    backends: tuple[str, ...] = BACKENDS


#: 30 seconds stand for "at once": half of the timeout that would end the round if nobody noticed.
FAULTS = {
    "none": Fault("nothing happens", "right", 0.0),
    "pause": Fault("a rank is stopped (SIGSTOP) for 0.3 s", "right", 0.0),
    "flicker": Fault("the link between the hosts is cut for up to a second", "right", 0.0, LINKED),
    "full": Fault("/dev/shm is full for a rank from the beginning", "right", 0.0),
    "kill": Fault("a rank is killed (SIGKILL)", "PeerLostError", 30.0),
    "kill two": Fault("two ranks are killed", "PeerLostError", 30.0),
    "leave": Fault("a rank finalizes early", "PeerLostError", 30.0),
    "stop": Fault("a rank is stopped until the others have given up", "CommTimeoutError", SHORT + 30.0),
    "abort": Fault("a rank aborts, from another thread", "AbortedError", 30.0),
    "cut": Fault("the link between the hosts is cut for good", "PeerLostError", 40.0, LINKED),
    "no descriptors": Fault(
        "a rank may open no more files, at the creation or a split", "PeerLostError", 30.0
    ),
    "no memory": Fault(
        "a rank may have no more shared memory, at the creation, a split, or for tensors",
        "PeerLostError",
        30.0,
        ("shm", "hosts"),
    ),
}


@dataclass(frozen=True)
class Round:
    """A round. `placement`: the host of each rank, or () for all on this machine's own network."""

    seed: int
    size: int
    backend: str
    fault: str
    victims: tuple[int, ...]
    at: int  # the step in which it strikes; CREATION: before there is a communicator
    delay: float  # seconds into the step
    placement: tuple[int, ...] = ()

    @classmethod
    def of(cls, seed: int, sizes: Sequence[int], backends: Sequence[str], faults: Sequence[str]) -> Round:
        def draw(what: str) -> random.Random:
            # One for each thing: fewer backends or faults to choose from change nothing else.
            return random.Random(f"{what} of {seed}")

        size = draw("size").choice(sizes)
        pairs = [(b, f) for b in backends for f in faults if b in FAULTS[f].backends]
        backend, fault = draw("fault").choice(pairs)
        victims = tuple(draw("victims").sample(range(size), 2 if fault == "kill two" else 1))
        at, delay = draw("step").randrange(STEPS), draw("delay").random() * LONGEST_DELAY
        if fault == "full" or (fault in _WHILE_COMING and draw("creation").random() < 0.25):
            at = CREATION
        placement: tuple[int, ...] = ()
        if backend == "hosts" or fault in ("cut", "flicker"):
            placement = _two_hosts(size, draw("hosts"))
        return cls(seed, size, backend, fault, victims, at, delay, placement)

    @property
    def again(self) -> str:
        """The arguments of the conductor that play it again."""
        which = f"--sizes {self.size} --backend {self.backend} --fault '{self.fault}'"
        return f"--rounds 1 --seed {self.seed} {which}"

    @property
    def split_at(self) -> int:
        """A step in which all split besides those in which they do so anyway, or -1."""
        return self.at if self.fault in _WHILE_COMING and self.at >= 0 else -1

    @property
    def lost(self) -> list[set[int]]:
        """For each rank, those that the others may name as the cause."""
        if self.fault != "cut":
            return [set(self.victims)] * self.size
        return [{r for r in range(self.size) if self.placement[r] != here} for here in self.placement]

    def specs(self, address: str, links: str, folder: str, prefix: str) -> list[Spec]:
        whole = Spec(
            seed=self.seed,
            rank=0,
            size=self.size,
            backend="auto" if self.backend == "hosts" else self.backend,
            steps=STEPS,
            timeout=SHORT if self.fault == "stop" else PATIENT,
            store=address,
            link=links,
            prefix=prefix,
            folder=folder,
            # auto finds it itself
            interface="eth0" if self.backend == "gloo" and self.placement else "",
            split_at=self.split_at,
        )
        fates = {"abort": "abort", "leave": "leave", "full": "full"} | {f: f for f in _WHILE_COMING}
        fate = fates.get(self.fault, "")
        return [
            replace(whole, rank=r, fate=fate, at=self.at)
            if r in self.victims and fate
            else replace(whole, rank=r)
            for r in range(self.size)
        ]


def _two_hosts(size: int, rng: random.Random) -> tuple[int, ...]:
    """Ranks in any order over two hosts, at least one on each."""
    first = rng.randrange(1, size)
    placement = [0] * first + [1] * (size - first)
    rng.shuffle(placement)
    return tuple(placement)
