"""What happens in a round: everything of it but the moment within a step follows from its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.chaos.spec import CREATION, SPLITS, Spec
from tests.chaos.training import LAYERS

PATIENT = 60.0  # seconds: the timeout of operations where none is meant to pass
SHORT = 10.0  # and where one is, after far more than any needs that nothing happens to
#: What `auto` makes for ranks on two hosts: by the backend that carries messages between them.
BETWEEN = {"hosts": "tcp", "hosts-gloo": "gloo", "hosts-ucx": "ucx"}
BACKENDS = ("shm", "gloo", "tcp", "ucx", *BETWEEN, "mpi")
CONNECTED = ("shm", "gloo", "tcp", "ucx", *BETWEEN)  # without a launcher's help
LINKED = ("gloo", "tcp", "ucx", *BETWEEN)  # those that reach another host

#: What a rank does to itself, told by its Spec. The others are done from outside.
OWN = ("abort", "leave", "full", "filled", "no descriptors", "no memory", "no address space")
LACKS = (
    "no descriptors",
    "no memory",
    "no address space",
)  # faults that the victim itself gets an error from


@dataclass(frozen=True)
class Scene:
    """A kind of program: how many steps it has, and until how long after a step's beginning a fault may
    strike, in seconds.
    """

    steps: int
    longest_delay: float


SCENES = {
    "operations": Scene(17, 0.006),  # splits among them, which take longer
    "creation": Scene(8, 0.02),
    "reconfigure": Scene(6, 0.03),
    "ddp": Scene(5 * LAYERS, 0.001),  # a step is the backward of a layer
    "fsdp2": Scene(5 * LAYERS, 0.001),
    "symmetric": Scene(30, 0.003),
}


_LONGEST_SPLIT = 0.15  # seconds, on two cores


@dataclass(frozen=True)
class Fault:
    """`error`: what the ranks get that live; `within`: seconds until the last one has it, far more than it
    takes; `act`: what is done; `scene`: the program in which it is done; `backends` that it can happen to;
    `leads`: whether it hits the first in the lists of handles, if there are any; None: now and then.
    """

    what: str
    error: str
    within: float
    act: str = ""
    scene: str = "operations"
    backends: tuple[str, ...] = CONNECTED
    leads: bool | None = None


#: 30 seconds stand for "at once": half of the timeout that would end the round if nobody noticed.
_ONCE, _LATE = 30.0, SHORT + 30.0
FAULTS = {
    "none": Fault("nothing happens", "right", 0.0, backends=BACKENDS),
    "pause": Fault("a rank is stopped (SIGSTOP) for 0.3 s", "right", 0.0, "pause", backends=BACKENDS),
    "flicker": Fault(
        "the link between the hosts is cut for up to a second", "right", 0.0, "flicker", backends=LINKED
    ),
    "full": Fault("/dev/shm is full for a rank from the beginning", "right", 0.0, "full"),
    "filled": Fault("/dev/shm, where its ring is, fills up for a rank", "right", 0.0, "filled"),
    "kill": Fault("a rank is killed (SIGKILL)", "PeerLostError", _ONCE, "kill", backends=BACKENDS),
    "kill two": Fault("two ranks are killed", "PeerLostError", _ONCE, "kill", backends=BACKENDS),
    "leave": Fault("a rank finalizes early", "PeerLostError", _ONCE, "leave", backends=BACKENDS),
    "stop": Fault(
        "a rank is stopped until the others have given up",
        "CommTimeoutError",
        _LATE,
        "stop",
        backends=BACKENDS,
    ),
    "abort": Fault("a rank aborts, from another thread", "AbortedError", _ONCE, "abort", backends=BACKENDS),
    "cut": Fault("the link between the hosts is cut for good", "PeerLostError", 40.0, "cut", backends=LINKED),
    "no descriptors": Fault(
        "a rank may open no more files, at the creation or a split", "PeerLostError", _ONCE, "no descriptors"
    ),
    "no memory": Fault(
        "a rank may have no more shared memory, at the creation, a split, or for tensors",
        "PeerLostError",
        _ONCE,
        "no memory",
        backends=("shm", *BETWEEN),
    ),
    "no address space": Fault(
        "a rank may map no more memory (RLIMIT_AS), at the creation or a split",
        "PeerLostError",
        _ONCE,
        "no address space",
    ),
    "stop store": Fault(
        "rank 0, which holds the job's store, is stopped while communicators are created one after the other",
        "CommTimeoutError",
        _LATE,
        "stop",
        "creation",
    ),
    "kill store": Fault("the same, but it is killed", "PeerLostError", _ONCE, "kill", "creation"),
    "kill in reconfigure": Fault(
        "a rank is killed while all reconfigure; the others reconfigure without it",
        "PeerLostError",
        _ONCE,
        "kill",
        "reconfigure",
    ),
    "stop in reconfigure": Fault(
        "the same, but it is stopped; it is not the first in the list of handles",
        "CommTimeoutError",
        _LATE,
        "stop",
        "reconfigure",
        leads=False,
    ),
    "stop store in reconfigure": Fault(
        "the same, but it is the first, which holds the store of the attempt",
        "CommTimeoutError",
        _LATE,
        "stop",
        "reconfigure",
        leads=True,
    ),
    "kill in ddp": Fault(
        "a rank is killed within the backward of DistributedDataParallel",
        "PeerLostError",
        _ONCE,
        "kill",
        "ddp",
        BACKENDS,
    ),
    "stop in ddp": Fault("the same, but it is stopped", "CommTimeoutError", _LATE, "stop", "ddp", BACKENDS),
    "kill in fsdp2": Fault(
        "a rank is killed within the backward of FSDP2", "PeerLostError", _ONCE, "kill", "fsdp2", BACKENDS
    ),
    "stop in fsdp2": Fault(
        "the same, but it is stopped", "CommTimeoutError", _LATE, "stop", "fsdp2", BACKENDS
    ),
    "kill in symm": Fault(
        "a rank is killed within puts with signals, waits for signals and exchanges of experts",
        "PeerLostError",
        _ONCE,
        "kill",
        "symmetric",
        ("shm",),
    ),
    "stop in symm": Fault(
        "the same, but it is stopped", "CommTimeoutError", _LATE, "stop", "symmetric", ("shm",)
    ),
    "no memory in symm": Fault(
        "a rank may have no more shared memory when symmetric memory is made or used",
        "PeerLostError",
        _ONCE,
        "no memory",
        "symmetric",
        ("shm",),
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
        what = FAULTS[fault]
        scene = SCENES[what.scene]
        victims = tuple(draw("victims").sample(range(size), 2 if fault == "kill two" else 1))
        if what.scene == "creation":
            victims = (0,)
        # In the first step of that scene some ranks may not have reached the store yet: for them, one that is
        # gone is one that has not come.
        first = 1 if what.scene == "creation" else 0
        at, delay = draw("step").randrange(first, scene.steps), draw("delay").random() * scene.longest_delay
        if what.act == "full" or (what.act in LACKS and draw("creation").random() < 0.25):
            at = CREATION
        if what.scene == "operations" and what.act not in ("", *OWN) and draw("split").random() < 0.25:
            at, delay = draw("step").choice(SPLITS), draw("delay").random() * _LONGEST_SPLIT
        placement: tuple[int, ...] = ()
        if backend in BETWEEN or fault in ("cut", "flicker"):
            placement = _two_hosts(size, draw("hosts"))
        return cls(seed, size, backend, fault, victims, at, delay, placement)

    @property
    def act(self) -> str:
        return FAULTS[self.fault].act

    @property
    def scene(self) -> str:
        return FAULTS[self.fault].scene

    @property
    def steps(self) -> int:
        return SCENES[self.scene].steps

    @property
    def lasts(self) -> float:
        """Seconds for which the link is cut, if it comes back."""
        return random.Random(f"duration of {self.seed}").random()

    @property
    def _names_interface(self) -> bool:
        """Else auto finds it: handles are made before there is another rank to reach."""
        return self.backend in ("gloo", "tcp", "ucx") or self.scene == "reconfigure"

    @property
    def again(self) -> str:
        """The arguments of the conductor that play it again."""
        which = f"--sizes {self.size} --backend {self.backend} --fault '{self.fault}'"
        return f"--rounds 1 --seed {self.seed} {which}"

    @property
    def split_at(self) -> int:
        """A step in which all split besides those in which they do so anyway, or -1."""
        return self.at if self.act in LACKS and self.at >= 0 else -1

    @property
    def lost(self) -> list[set[int]]:
        """For each rank, those that the others may name as the cause."""
        if self.act != "cut":
            return [set(self.victims)] * self.size
        return [{r for r in range(self.size) if self.placement[r] != here} for here in self.placement]

    def specs(self, address: str, links: str, folder: str, prefix: str) -> list[Spec]:
        whole = Spec(
            seed=self.seed,
            rank=0,
            size=self.size,
            backend="auto" if self.backend in BETWEEN else self.backend,
            between=BETWEEN.get(self.backend, ""),
            scene=self.scene,
            steps=self.steps,
            timeout=SHORT if self.act == "stop" else PATIENT,
            store=address,
            link=links,
            prefix=prefix,
            folder=folder,
            victims=self.victims,
            leads=FAULTS[self.fault].leads,
            interface="eth0" if self.placement and self._names_interface else "",
            split_at=self.split_at,
        )
        fate = self.act if self.act in OWN else ""
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
