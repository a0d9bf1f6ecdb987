"""clog with torchcomms' parameters. The lines are those of unicomm's operation log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unicomm.comms.execution.operation_log import clog as our_clog

if TYPE_CHECKING:
    from unicomm.torchcomms.communicator import TorchComm


class clog(our_clog):
    """Writes the operations of the registered communicators and of their splits.

    Args:
        output: a path. The file is emptied.
        events: what to log beside the beginnings of operations: "ALL" or "LIFECYCLE" for their ends, too.
        verbose: "buffers" for the addresses of the tensors.
    """

    def __init__(self, output: str, events: Sequence[str], verbose: Sequence[str] = ()) -> None:
        Path(output).write_text("")
        super().__init__(output, events, verbose)

    def register_with_comm(self, comm: TorchComm) -> None:  # type: ignore[override]
        """Logs `comm` and its later splits. Raises `InvalidArgumentError` if it is registered already."""
        super().register_with_comm(comm)
        comm._followers.append(self)
