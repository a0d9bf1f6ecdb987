"""Recorded values: what the ranks of a small run with real values have received, for larger rehearsals.

A rehearsal with real values keeps the small tensors that its ranks receive, with the line of the program that
received them; `write` makes a JSON file of them:

    {"ranks": 2, "values": {"train.py:12 all_reduce": {"0": [[3], [2]], "1": [[3], [2]]}}}

For each line and operation, and for each rank: the values of the first call there, of the second, and so on.
In a rehearsal with that file, rank r receives what rank r modulo `ranks` has received at the same line in the
same call, if it has as many elements. Everything else is made up as before. The file may be edited by hand.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unicomm.comms.operations.call import Call

from ..places import user_place

_MOST = 256  # elements of a tensor that is kept: control flow depends on few numbers
Values = dict[str, dict[str, list[Any]]]


@dataclass(frozen=True)
class Recording:
    """The contents of a file of recorded values."""

    ranks: int
    values: Mapping[str, Mapping[str, Sequence[Any]]]


def read(path: Path) -> Recording:
    """Returns the values of a file. Raises `ValueError` for a file that is none, `OSError` without one."""
    try:
        data = json.loads(path.read_text())
        recording = Recording(int(data["ranks"]), data["values"])
        good = recording.ranks > 0 and all(
            isinstance(value, list)
            for of_rank in recording.values.values()
            for calls in of_rank.values()
            for value in calls
        )
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError):
        good = False
    if not good:
        raise ValueError(
            f"{path} has no recorded values: `--values real --save-values FILE` writes such files"
        )
    return recording


def write(path: Path, of_ranks: Iterable[Path], ranks: int) -> int:
    """Writes the file of a rehearsal from what its ranks have kept. Returns how many values it has."""
    merged: Values = defaultdict(dict)
    count = 0
    for rank, file in enumerate(of_ranks):
        if not file.exists():
            continue  # the rank ended before it had run
        for key, calls in json.loads(file.read_text()).items():
            merged[key][str(rank)] = calls
            count += sum(bool(value) for value in calls)
    path.write_text(json.dumps({"ranks": ranks, "values": merged}, indent=1) + "\n")
    return count


class ReceivedValues:
    """What one rank receives: kept, or replaced by what a recording has.

    `recording`: None to keep values.
    """

    def __init__(self, rank: int, recording: Recording | None = None) -> None:
        self._recording = recording
        self._rank = rank if recording is None else rank % recording.ranks
        self.kept: defaultdict[str, list[Any]] = defaultdict(list)
        self._counts: defaultdict[str, int] = defaultdict(int)

    def issued(self, calls: Sequence[Call], own: int) -> list[tuple[str, int, Call]]:
        """Returns where each call that receives is in the recording. To be called when it is issued."""
        places = []
        for call in calls:
            if call.outputs and call.name != "barrier" and (call.root != own or call.op is not None):
                file, _, line = user_place().rpartition(":")
                key = f"{Path(file).name}:{line} {call.name}"
                places.append((key, self._counts[key], call))
                self._counts[key] += 1
        return places

    def received(self, places: Sequence[tuple[str, int, Call]]) -> None:
        """Keeps or replaces the outputs of these calls. To be called when they have been written."""
        for key, number, call in places:
            if any(out.is_complex() or out.device.type == "meta" for out in call.outputs):
                continue
            if self._recording is None:
                kept = self.kept[key]
                kept.extend([[]] * (number + 1 - len(kept)))
                if sum(out.numel() for out in call.outputs) <= _MOST:
                    kept[number] = [x for out in call.outputs for x in out.detach().reshape(-1).tolist()]
                continue
            calls = self._recording.values.get(key, {}).get(str(self._rank), ())
            if number < len(calls) and len(calls[number]) == sum(out.numel() for out in call.outputs):
                _replace(call.outputs, calls[number])

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.kept))


def _replace(outputs: Sequence[torch.Tensor], values: Sequence[Any]) -> None:
    at = 0
    with torch.no_grad():
        for out in outputs:
            part = values[at : at + out.numel()]
            out.detach().copy_(torch.tensor(part, dtype=out.dtype).reshape(out.shape))
            at += out.numel()
