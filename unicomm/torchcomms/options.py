"""Options as torchcomms has them: objects whose attributes can be set, with timeouts as timedelta."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from unicomm.comms.options import DEFAULT_TIMEOUT
from unicomm.comms.options import CommOptions as OurOptions

#: Hints of one operation: text to text.
Hints = Mapping[str, str] | None


@dataclass
class CommOptions:
    """What `TorchComm.get_options()` returns: a copy, whose changes have no effect on the communicator."""

    abort_process_on_timeout_or_error: bool = True
    timeout: timedelta = timedelta(seconds=DEFAULT_TIMEOUT)
    high_priority_stream: bool = False
    store: Any = None
    enable_reconfigure: bool = False
    hints: dict[str, str] = field(default_factory=dict)


def as_torchcomms(options: OurOptions) -> CommOptions:
    """Returns torchcomms' form of a communicator's options."""
    return CommOptions(
        abort_process_on_timeout_or_error=options.abort_process_on_timeout_or_error,
        timeout=timedelta(seconds=options.timeout),
        enable_reconfigure=options.enable_reconfigure,
        hints=dict(options.hints),
    )


@dataclass
class BatchP2POptions:
    """Options of `BatchSendRecv.issue`. A timeout of 0 is the communicator's."""

    hints: dict[str, str] = field(default_factory=dict)
    timeout: timedelta = timedelta(0)


@dataclass
class ReconfigureOptions:
    """The arguments of `TorchComm.reconfigure` as one object, which no function takes."""

    uuid: int = 0
    init_handles: list[str] | set[str] = field(default_factory=list)
    timeout: timedelta | None = None
    hints: dict[str, str] = field(default_factory=dict)


def check_hints(hints: Hints) -> None:
    """Accepts the hints of one operation, none of which has a meaning here.

    Raises `TypeError` unless they are text to text, as torchcomms does.
    """
    if not hints:
        return
    texts = [text for pair in hints.items() for text in pair] if isinstance(hints, Mapping) else [hints]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise TypeError(f"hints are a dict of str to str, not {wrong[0]!r} in {hints!r}")
