"""Options of a communicator, and the reading of timeouts and hints."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from .errors import InvalidArgumentError

#: Seconds or a timedelta; None and 0 mean the communicator's own timeout.
Timeout = timedelta | float | None
#: Options, as text: name to value. True and False stand for their text.
Hints = Mapping[str, str | bool] | None

DEFAULT_TIMEOUT = 600.0
LONGEST_TIMEOUT = 1e9  # seconds, about 30 years: locks and clocks cannot count more


@dataclass(frozen=True)
class Hint:
    """A hint that a backend takes: name, parser of its text, default value, and documentation."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    doc: str


def parse_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected true or false")


def parse_size(text: str) -> int:
    """Bytes, with an optional suffix K, M or G (powers of 1024)."""
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    value = int(text[:-1] if scale > 1 else text) * scale
    if value <= 0:
        raise ValueError("expected a positive size such as 262144 or 256K")
    return value


def parse_reduction(text: str) -> str:
    if text not in ("ordinary", "reproducible"):
        raise ValueError("expected ordinary or reproducible")
    return text


CHECKSUM = "checksum"  # the hint

#: How elements may travel between hosts: the values of the hint `wire`.
WIRES = ("plain", "bfloat16", "float8_e4m3fn", "int8", "mxfp8")


def parse_wire(text: str) -> str:
    if text not in WIRES:
        raise ValueError(f"expected one of {', '.join(WIRES)}")
    return text


def parse_rounding(text: str) -> str:
    name, colon, seed = text.partition(":")
    if text != "nearest" and (name != "stochastic" or (colon and not seed.isdecimal())):
        raise ValueError("expected nearest, stochastic, or stochastic: and a whole number")
    if colon and int(seed) >= 1 << 63:
        raise ValueError("the number has more than 63 bits")
    return text


# Hints that every backend takes.
COMMON_HINTS = (
    Hint(
        CHECKSUM,
        parse_bool,
        False,
        "Records get checksums of the data, and ranks whose results differ are named. Also of one call."
        " Default: UNICOMM_CHECKSUM.",
    ),
    Hint(
        "reduction",
        parse_reduction,
        "ordinary",
        "reproducible: sums and averages of floats have the same bits whatever the order of the ranks, their"
        " hosts and the backend. Also of one call, which ordinary excepts. Default: UNICOMM_REDUCTION.",
    ),
    Hint(
        "wire",
        parse_wire,
        "plain",
        "How floats travel between hosts in all_reduce, reduce_scatter, all_gather and all_to_all: plain, or"
        " in fewer bytes as bfloat16, float8_e4m3fn, int8 or mxfp8. Also of one call. Default: UNICOMM_WIRE.",
    ),
    Hint(
        "wire_rounding",
        parse_rounding,
        "nearest",
        "How they are rounded: nearest (even), stochastic, or stochastic:SEED. Also of one call.",
    ),
    Hint(
        "persistent_store",
        parse_bool,
        False,
        "The store outlives the communicator. For compatibility: any store is kept as long as needed.",
    ),
)


def read_hints(hints: Hints, known: Iterable[Hint], backend: str) -> dict[str, Any]:
    """The values of all known hints. An unknown or unreadable hint raises `InvalidArgumentError`."""
    table = {hint.name: hint for hint in (*COMMON_HINTS, *known)}
    values = {hint.name: hint.default for hint in table.values()}
    for name, text in copy_hints(hints).items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise InvalidArgumentError(
                f"hint {name!r}={text!r} is not text", hint="hints are a dict of str to str"
            )
        if name not in table:
            close = difflib.get_close_matches(name, table, n=1)
            raise InvalidArgumentError(
                f"backend '{backend}' knows no hint '{name}'",
                hint=(f"did you mean '{close[0]}'? " if close else "") + f"known: {', '.join(sorted(table))}",
            )
        try:
            values[name] = table[name].parse(text)
        except ValueError as error:
            raise InvalidArgumentError(
                f"hint '{name}' has the unreadable value '{text}': {error}", hint=table[name].doc
            ) from None
    if values["wire"] != "plain" and values["reduction"] == "reproducible":
        raise InvalidArgumentError(
            f"wire={values['wire']} rounds what reduction=reproducible must not round",
            hint="choose one of them: wire=plain or reduction=ordinary",
        )
    return values


def copy_hints(hints: Hints) -> dict[str, str]:
    """A copy of the hints, with True and False as text; empty for None. `read_hints` reads them."""
    if hints is not None and not isinstance(hints, Mapping):
        raise InvalidArgumentError(f"hints={hints!r} is no mapping", hint="hints are a dict of str to str")
    return {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in (hints or {}).items()
    }


def with_environment(hints: dict[str, str]) -> dict[str, str]:
    """The hints, with those that the environment sets for all communicators of the process."""
    for name in ("reduction", "wire", CHECKSUM):
        if value := os.environ.get(f"UNICOMM_{name.upper()}", ""):
            hints.setdefault(name, value)
    return hints


def seconds(timeout: timedelta | float | None, default: float) -> float:
    """A timeout in seconds. None and 0 mean the default, as in torchcomms; the limit is `LONGEST_TIMEOUT`."""
    if timeout is None:
        return default
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise InvalidArgumentError(
            f"timeout={timeout!r} is no duration",
            hint="pass a datetime.timedelta or seconds; None or 0 for the communicator's own timeout",
        )
    return min(float(value), LONGEST_TIMEOUT) or default


def default_timeout() -> float:
    text = os.environ.get("TORCHCOMM_TIMEOUT_SECONDS", "")
    if not text:
        return DEFAULT_TIMEOUT
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise InvalidArgumentError(
            f"TORCHCOMM_TIMEOUT_SECONDS={text!r} is no positive number of seconds",
            hint="unset it or set e.g. TORCHCOMM_TIMEOUT_SECONDS=600",
        )
    return value


@dataclass(frozen=True)
class CommOptions:
    """The options with which a communicator was created; `Communicator.get_options()` returns them.

    Attributes:
        timeout: seconds that creation may take, and each operation that has no timeout of its own.
        abort_process_on_timeout_or_error: end the process (SIGABRT) when the communicator breaks. Off by
            default, unlike in torchcomms, because a program can catch an exception and write a checkpoint.
            Has no effect with enable_reconfigure, as in torchcomms.
        enable_reconfigure: whether the communicator may be connected with other ranks later.
        hints: the backend's hints as given.
    """

    timeout: float = DEFAULT_TIMEOUT
    abort_process_on_timeout_or_error: bool = False
    enable_reconfigure: bool = False
    hints: Mapping[str, str] = field(default_factory=dict)
