"""Ending files: how the process of a rank ended, kept beside its ring.

Three files tell it, all in the folder for rings:

NAME.ending     JSON, written by the process itself: who it is, and the exception or the call of `sys.exit`
                that ended it. NAME is the ring's name without its suffix.
NAME.stacks     text of `faulthandler`: where the threads were when the process crashed or was asked.
NAME.exits      JSON, written by `unicomm run`: the exit codes of its ranks that ended by themselves.

The file of a process that runs, or that nothing ended, says only who it is. `EndingFiles` joins the files to
one `Ending` for each rank. docs/design/endings.md has the reasons.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from unicomm.flight_recorder.texts import MOST_RANKS, printable

from .places import Place, library_folders, user_place
from .stacks import Stacks, parse_stacks

ENDING, STACKS, EXITS = ".ending", ".stacks", ".exits"
SUFFIXES = (ENDING, STACKS, EXITS)
FORMAT = 1
#: The launcher's process, set by `unicomm run`: its children note their end from `import torch` on.
LAUNCHER = "UNICOMM_LAUNCHER_PID"
_MOST_TEXT = 2000  # characters of an exception's message

# Errors that a rank raises because another one has failed. torch's Reducer raises ours as a RuntimeError with
# our text; torch's own backends have no types for lost peers.
_CONSEQUENCES = frozenset(
    {
        "MismatchError",
        "SilentCorruptionError",
        "CommTimeoutError",
        "DeadlockError",
        "PeerLostError",
        "AbortedError",
        "BackendError",
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        "KeyboardInterrupt",
        "SignalException",
    }
)
#: Errors of our own about this rank's call alone, whose texts are like those of the others.
_OWN = frozenset({"InvalidArgumentError", "UnsupportedError"})
_CONSEQUENCE_TEXT = re.compile(
    r"\[\w+(?: #\d+)?, communicator '|gloo/transport|[Cc]onnection (?:was )?(?:closed|reset)|Broken pipe"
    r"|NCCL error|Watchdog caught collective"
)


@dataclass(frozen=True)
class Raised:
    """An exception that ended a process.

    Attributes:
        type: the name of its class.
        message: the first line of its text.
        frames: the places of its traceback, the innermost first.
        consequence: whether it says that another rank has failed; also if such an error led to it.
    """

    type: str
    message: str
    frames: tuple[Place, ...]
    consequence: bool = False


@dataclass
class Ending:
    """How the process of a rank ended, as far as it is known.

    Attributes:
        rank: the rank in the job, -1 if unknown.
        name: the name of its files without suffix, "" if only the launcher knows the process.
        ended_ns: wall-clock time of the exception, the exit or the launcher's look; 0 if unknown.
        raised: the exception that ended it.
        exit_call: where `sys.exit` was called with a code other than 0.
        exit_argument: that code.
        exit_code: what the launcher saw: the exit code, or minus the signal; None if there is no launcher.
        out_of_memory: the evidence that the kernel ended it for want of memory, "" without evidence.
        stacks: where its threads were, when it crashed or before it was ended.
        library: the folders of the interpreter and of installed packages.
    """

    rank: int = -1
    pid: int = 0
    host: str = ""
    name: str = ""
    ended_ns: int = 0
    raised: Raised | None = None
    exit_call: tuple[Place, ...] = ()
    exit_argument: int = 0
    exit_code: int | None = None
    out_of_memory: str = ""
    stacks: Stacks = field(default_factory=Stacks)
    library: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        """Whether the process is known to have ended. A process notes who it is as soon as it begins."""
        return bool(self.raised or self.exit_call or self.exit_code is not None or self.stacks.crash)

    @property
    def alive_ns(self) -> int:
        """When the process was seen to live: when it was asked for its stacks, or got SIGTERM; else 0.

        Launchers end the ranks that are left when one has failed.
        """
        return 0 if self.over or not self.stacks.threads else self.stacks.at_ns

    def place(self, frames: tuple[Place, ...]) -> Place | None:
        """Returns the user's own place among frames, the innermost first; None without frames."""
        return user_place(frames, self.library)


# --- written by the process -----------------------------------------------------------------------------


def describe_process(
    rank: int, pid: int, host: str, ticks: int, namespace: str, stack_signal: int
) -> dict[str, Any]:
    """Returns what the file of a running process says.

    `stack_signal` is the signal that asks it for its stacks, 0 for none.
    """
    return {
        "format": FORMAT,
        "rank": rank,
        "pid": pid,
        "host": host,
        "ticks": ticks,
        "pid_namespace": namespace,
        "stack_signal": stack_signal,
        "library": library_folders(),
    }


def describe_exception(error: BaseException, at_ns: int) -> dict[str, Any]:
    """Returns the keys that say which exception ended the process."""
    text = str(error).strip()[:_MOST_TEXT]
    raised = Raised(
        type(error).__name__,
        text.splitlines()[0] if text else "",
        tuple(reversed(Place.of_traceback(error.__traceback__))),
        is_consequence(error),
    )
    return {"ended_ns": at_ns, "raised": asdict(raised)}


def is_consequence(error: BaseException) -> bool:
    """Whether an exception, or one that led to it, says that another rank has failed."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        kinds = {c.__name__ for c in type(one).__mro__}
        if kinds & _CONSEQUENCES or (not kinds & _OWN and _CONSEQUENCE_TEXT.search(str(one))):
            return True
        todo += [one.__cause__, one.__context__]
    return False


# --- written by the launcher ----------------------------------------------------------------------------


def describe_exits(
    host: str, ended: Mapping[int, int], pids: Mapping[int, int], out_of_memory: Mapping[int, str], at_ns: int
) -> str:
    """Returns the text of an exits file.

    Args:
        ended: by rank, the exit code, or minus the signal, of processes that ended by themselves.
        pids: by rank, the process.
        out_of_memory: by rank, the evidence that the kernel ended it for want of memory.
    """
    ranks = {
        str(rank): {
            "pid": pids.get(rank, 0),
            "exit_code": code,
            "out_of_memory": out_of_memory.get(rank, ""),
            "ended_ns": at_ns,
        }
        for rank, code in ended.items()
    }
    return json.dumps({"format": FORMAT, "host": host, "ranks": ranks})


# --- read -----------------------------------------------------------------------------------------------


class EndingError(ValueError):
    """A file is no ending file of a known format."""


@dataclass
class EndingFiles:
    """Collects ending files; `joined` returns an `Ending` for each process."""

    _own: dict[str, Ending] = field(default_factory=dict)  # by name
    _stacks: dict[str, tuple[str, int]] = field(default_factory=dict)
    _exits: list[Ending] = field(default_factory=list)

    def add(self, path: str, data: bytes, modified_ns: int = 0) -> None:
        """Adds a file, recognized by its suffix; `modified_ns` is the wall-clock time of its last change.

        Raises `EndingError` when it is damaged.
        """
        file = path.replace("!", "/").rsplit("/", 1)[-1]
        name, _, suffix = file.rpartition(".")
        if f".{suffix}" == STACKS:
            self._stacks[name] = data.decode("utf-8", "replace"), modified_ns
            return
        try:
            facts = json.loads(data)
            if facts["format"] != FORMAT:
                raise EndingError(f"format {facts['format']} is unknown; this reader knows {FORMAT}")
            if f".{suffix}" == EXITS:
                self._exits += [_exit(_rank(rank), facts["host"], of) for rank, of in facts["ranks"].items()]
            else:
                self._own[name] = _own(name, facts)
        except (KeyError, TypeError, AttributeError, RecursionError, ValueError, OverflowError) as error:
            if isinstance(error, EndingError):
                raise
            raise EndingError(f"not an ending file: {error}") from None

    def joined(self, ranks_of: Mapping[str, int] | None = None) -> list[Ending]:
        """Returns the endings, by rank.

        Args:
            ranks_of: by name, the rank of each ring; it counts where a process did not know its rank.
        """
        out = []
        for name, ending in self._own.items():
            if ending.rank < 0:
                ending.rank = (ranks_of or {}).get(name, -1)
            if stacks := self._stacks.get(name):
                ending.stacks = parse_stacks(*stacks)
            out.append(ending)
        for exit_ in self._exits:
            same = [e for e in out if e.rank == exit_.rank and e.pid == exit_.pid]
            if not same:
                out.append(exit_)
            for one in same:
                one.exit_code, one.out_of_memory = exit_.exit_code, exit_.out_of_memory
                one.ended_ns = one.ended_ns or exit_.ended_ns
        return sorted((e for e in out if e.rank >= 0), key=lambda e: (e.rank, e.ended_ns))


def _number(value: Any) -> int:
    """Returns a number of at most 64 bits. Raises `ValueError` for any other."""
    number = int(value)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError("a number has more than 64 bits")
    return number


def _rank(value: Any) -> int:
    rank = _number(value)
    if rank >= MOST_RANKS:
        raise ValueError(f"rank {rank} is no rank of a job")
    return rank


def _own(name: str, facts: dict[str, Any]) -> Ending:
    raised = facts.get("raised")
    if raised is not None:
        texts = printable(str(raised["type"])), printable(str(raised["message"]))
        raised = Raised(*texts, _places(raised["frames"]), bool(raised["consequence"]))
    return Ending(
        rank=_rank(facts["rank"]),
        pid=_number(facts["pid"]),
        host=printable(str(facts["host"])),
        name=name,
        ended_ns=_number(facts.get("ended_ns", 0)),
        raised=raised,
        exit_call=_places(facts.get("exit_call", ())),
        exit_argument=_number(facts.get("exit_argument", 0)),
        library=tuple(str(f) for f in facts.get("library", ())),
    )


def _exit(rank: int, host: Any, facts: dict[str, Any]) -> Ending:
    return Ending(
        rank=rank,
        pid=_number(facts["pid"]),
        host=printable(str(host)),
        ended_ns=_number(facts["ended_ns"]),
        exit_code=_number(facts["exit_code"]),
        out_of_memory=printable(str(facts["out_of_memory"])),
    )


def _places(data: Any) -> tuple[Place, ...]:
    return tuple(
        Place(printable(str(p["file"])), _number(p["line"]), printable(str(p["function"]))) for p in data
    )


def signal_name(code: int) -> str:
    """The name of the signal in an exit code, which is minus the signal's number; "" if it is none."""
    if code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"


def side_files(folder: Path) -> list[Path]:
    """The ending files in a folder, in the order of their names."""
    return sorted(p for p in folder.iterdir() if p.suffix in SUFFIXES and not p.name.startswith("."))
