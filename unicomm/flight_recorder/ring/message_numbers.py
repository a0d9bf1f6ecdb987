"""The numbers of messages in a ring, by which sends and receives belong together."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def as_matched(records: npt.NDArray[Any], receive: int, from_any: int) -> npt.NDArray[Any]:
    """Returns records whose numbers `seq` are those of the messages that receives have got.

    A receive from any rank is numbered when its sender is known, behind receives from that rank that were
    issued later. But it has taken the first message that had no earlier receive. So the numbers of a pair of
    ranks belong to its receives in order of issue.

    Args:
        records: of a ring, in order of issue.
        receive: the flags of a receive.
        from_any: the flag of a receive from any rank whose sender is known.
    """
    taken = (records["flags"] & from_any) != 0
    if not taken.any():
        return records
    out = records.copy()
    receives = ((records["flags"] & receive) == receive) & (records["peer"] >= 0)
    pair = (records["comm"].astype(np.int64) << 32) | records["peer"].astype(np.int64)
    for one in np.unique(pair[taken]).tolist():
        here = receives & (pair == one)
        out["seq"][here] = np.sort(records["seq"][here])
    return out
