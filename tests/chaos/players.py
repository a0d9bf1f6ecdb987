"""Players: processes that play rounds beside each other, each on a stage of its own.

Most of a round in which ranks are stopped is waiting.
"""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.chaos import report
from tests.chaos.judge import judge
from tests.chaos.play import Play, Stage
from tests.chaos.rounds import Round
from tests.chaos.spec import RINGS
from tests.commands import run
from unicomm.flight_recorder.ring.endings import side_files

_ENDING = 60.0  # seconds for the end of a player's stage


def play_round(plan: Round, stage: Stage, kept: Path, serial: int) -> tuple[Play, list[str]]:
    """One round, and what was wrong with it. A bad one leaves its rings and output in `kept`."""
    # Ranks that are just being started write into it until the stage ends; its folder takes this one along.
    with tempfile.TemporaryDirectory(prefix="round-", dir=stage.folder, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        play = Play(plan, stage, folder, serial)
        play.run()
        wrong = judge(play, folder)
        if wrong:
            for left in (*folder.glob("*.ucring"), *side_files(folder)):  # of those that were killed
                left.rename(folder / RINGS / left.name)
            wrong += [verdict(folder / RINGS), f"again: python tests/chaos/conductor.py {plan.again}"]
            kept.mkdir(parents=True, exist_ok=True, mode=0o700)
            where = Path(tempfile.mkdtemp(prefix=f"seed{plan.seed}-", dir=kept))
            (folder / "wrong.txt").write_text("\n".join([str(plan), *wrong, ""]))
            shutil.copytree(folder, where, dirs_exist_ok=True)
            wrong.append(f"rings and output: {where}")
    return play, wrong


def verdict(folder: Path) -> str:
    """What the flight recorder makes of the ranks' rings."""
    command = [sys.executable, "-m", "unicomm", "trace", "analyze", str(folder)]
    said = run(command, within=120)
    return said.stdout[:1500].strip()


class Players:
    """`n` of them. Leaving the block ends them, their stages and what is played there."""

    def __init__(self, n: int, kept: Path, version: str) -> None:
        self._links: list[Connection] = []
        self._processes = []
        fork = multiprocessing.get_context("fork")
        for _ in range(n):
            mine, theirs = fork.Pipe()
            others = [*self._links, mine]
            process = fork.Process(target=_player, args=(theirs, others, kept, version))
            process.start()
            theirs.close()
            self._links.append(mine)
            self._processes.append(process)

    def play(self, plans: Sequence[Round]) -> Iterator[tuple[Round, report.Record | None]]:
        """Yields each round when it begins, with None, and when it is over, with its record."""
        waiting = list(enumerate(plans))[::-1]
        playing: dict[Connection, Round] = {}
        idle = list(self._links)
        while waiting or playing:
            while waiting and idle:
                link, (serial, plan) = idle.pop(), waiting.pop()
                playing[link] = plan
                link.send((serial, plan))
                yield plan, None
            for link in wait(list(playing)):
                assert isinstance(link, Connection)
                record = link.recv()
                plan = playing.pop(link)
                idle.append(link)
                yield plan, record

    def __enter__(self) -> Players:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for link in self._links:
            link.close()
        if kind is not None:
            for process in self._processes:
                process.terminate()
        for process in self._processes:
            process.join(_ENDING)
            process.kill()


def _player(link: Connection, others: Sequence[Connection], kept: Path, version: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # hosts and ranks end with this
    for other in others:  # an end shows when this process's copies are closed
        other.close()
    with Stage() as stage:
        while True:
            try:
                serial, plan = link.recv()
            except EOFError:
                return
            began = time.monotonic()
            play, wrong = play_round(plan, stage, kept, serial)
            link.send(report.record(play, wrong, time.monotonic() - began, version))
