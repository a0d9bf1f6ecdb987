"""Checksums: those of a table's rows, of which most jobs have none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unicomm.flight_recorder.ring.reader import CHECKSUMS, INPUT_CHECKSUM, OUTPUT_CHECKSUM

Column = npt.NDArray[Any]


@dataclass
class Checksums:
    """The checksums of the rows that have one.

    Attributes:
        rows: sorted.
        flags: INPUT_CHECKSUM, OUTPUT_CHECKSUM and COMPARED of `ring.reader`.
        input, output: uint64; 0 where the flag is missing.
    """

    rows: Column
    flags: Column
    input: Column
    output: Column

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, columns: Mapping[str, Column], prefix: str = "") -> Checksums | None:
        """The checksums in columns flags, input_checksum and output_checksum; None if there are none."""
        flags = columns[f"{prefix}flags"].astype(np.uint16) & np.uint16(CHECKSUMS)
        rows = np.flatnonzero(flags & np.uint16(INPUT_CHECKSUM | OUTPUT_CHECKSUM))
        if not len(rows):
            return None
        flags = flags[rows]
        sums = []
        for side, flag in (("input", INPUT_CHECKSUM), ("output", OUTPUT_CHECKSUM)):
            known = (flags & np.uint16(flag)) != 0
            values = columns[f"{prefix}{side}_checksum"][rows].astype(np.uint64)
            sums.append(np.where(known, values, np.uint64(0)))
        return cls(rows, flags, sums[0], sums[1])

    @classmethod
    def joined(cls, parts: Sequence[tuple[int, Checksums]]) -> Checksums:
        """The checksums of several sources: (first row of the source, checksums by row in the source)."""
        rows = [np.zeros(0, np.int64), *(part.rows + begin for begin, part in parts)]
        flags, first, second = ([np.zeros(0, dtype)] for dtype in (np.uint16, np.uint64, np.uint64))
        for _, part in parts:
            flags.append(part.flags)
            first.append(part.input)
            second.append(part.output)
        columns: list[Column] = [np.concatenate(c) for c in (rows, flags, first, second)]
        order = np.argsort(columns[0], kind="stable")
        return cls(*(column[order] for column in columns))

    def find(self, rows: Column) -> Column:
        """The index of each row's checksums here; -1 for rows without."""
        if not len(self.rows):
            return np.full(len(rows), -1, np.int64)
        at = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        return np.where(self.rows[at] == rows, at, -1)

    def texts(self, row: int) -> dict[str, str]:
        """The checksums of a row as text, by "input" and "output"; empty if it has none."""
        at = int(self.find(np.asarray([row]))[0]) if len(self.rows) else -1
        if at < 0:
            return {}
        sides = (("input", INPUT_CHECKSUM, self.input), ("output", OUTPUT_CHECKSUM, self.output))
        return {side: f"{int(sums[at]):016x}" for side, flag, sums in sides if int(self.flags[at]) & flag}
