"""Hints of a communicator of NCCL or RCCL. Each field of `ncclConfig_t` is one, under a Python name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from unicomm import _core
from unicomm.comms.errors import InvalidArgumentError, UnsupportedError
from unicomm.comms.options import Hint

from .library import Library, version_text

_SIGNALS = 8  # default number of signal indices of a communicator, if the library supports several

_MEANING = {
    "blocking": "0: the library's calls return at once, and unicomm polls for their end. Default: 1.",
    "cga_cluster_size": "Thread blocks in a cluster, 0 to 8.",
    "min_ctas": "Minimum of thread blocks for an operation, 1 to 32.",
    "max_ctas": "Maximum of thread blocks for an operation, 1 to 32: fewer leave more of the GPU to others.",
    "net_name": "Name of the network plugin to use, such as IB or Socket.",
    "split_share": "0: communicators split from this one share nothing with it. 1 is refused.",
    "traffic_class": "Traffic class of messages on InfiniBand.",
    "comm_name": "Name in the library's own log. Default: the communicator's.",
    "nvls_ctas": "Thread blocks for NVLink SHARP.",
    "num_rma_sig": f"Number of signal counters of each pair of ranks: one for puts, one for each window. "
    f"Default: {_SIGNALS}.",
}


def _name(field: str) -> str:
    """Returns the hint of a config field: minCTAs -> min_ctas."""
    words = re.sub(r"CTAs", "Ctas", re.sub(r"CTA(?!s)", "Cta", field))
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", words).lower()


_FIELDS = {_name(field): (field, text, since) for field, text, since in _core.nccl_config_fields()}


def _whole(text: str) -> int:
    value = int(text)
    if not -(1 << 31) < value < 1 << 31:
        raise ValueError("expected a 32-bit integer")
    return value


def _share(text: str) -> int:
    if _whole(text) == 1:
        raise InvalidArgumentError(
            "split_share=1: communicators that share resources share the library's flag for aborts, so an "
            "abort of one ends operations of the other, which leave wrong data without an error",
            hint="leave the hint out, or pass split_share=0",
        )
    return _whole(text)


def _one_of(*texts: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in texts:
            raise ValueError(f"expected {' or '.join(texts)}")
        return text

    return read


def _ranks(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError("expected a number of ranks")
    return value


# With one unique ID all ranks connect to one root, one after the other. So NCCL's guide recommends several
# IDs for hundreds of ranks. The size from which on this pays was not measured.
_LARGE = 256

_PARSERS = {"split_share": _share}

HINTS = (
    Hint(
        "symmetric",
        _one_of("auto", "cuda_ipc", "windows", "nvshmem"),
        "auto",
        "Memory behind symmetric memory: cuda_ipc, device memory that the processes of one host open; "
        "windows, the library's own (NCCL since 2.29.2); nvshmem, NVSHMEM's heap. Default: auto, which is "
        "cuda_ipc if all ranks are on one host, else windows.",
    ),
    Hint(
        "large_world",
        _ranks,
        _LARGE,
        "Number of ranks from which on they connect through several roots (CommInitRankScalable, since NCCL "
        f"2.23): one for 64 ranks, at least 2. Default: {_LARGE}.",
    ),
    Hint(
        "split_by",
        _one_of("split", "init"),
        "split",
        "How split creates communicators: split, by the library's split, which all ranks of the parent call; "
        "init, as a new communicator, which only the members call.",
    ),
    Hint(
        "reconfigure_by",
        _one_of("shrink", "init"),
        "shrink",
        "How reconfigure creates communicators: shrink, by the library's shrink and grow where possible; "
        "init, always as new ones.",
    ),
    *(
        Hint(
            name,
            str if text else _PARSERS.get(name, _whole),
            None,
            _MEANING.get(name, f"{field} of the library's config, since NCCL {version_text(since)}."),
        )
        for name, (field, text, since) in _FIELDS.items()
    ),
)


def settings_of(hints: Mapping[str, Any], name: str, library: Library) -> list[tuple[str, Any]]:
    """Returns (field, value) pairs for the library's config.

    Raises `UnsupportedError` for a hint whose field the library is too old for.
    """
    settings = []
    for hint, (field, _, since) in _FIELDS.items():
        value = hints.get(hint)
        if value is None and hint == "comm_name" and since <= library.version:
            value = name
        if value is None and hint == "num_rma_sig" and since <= library.version:
            value = _SIGNALS
        if value is None:
            continue
        if since > library.version:
            title, version = library.vendor.title, version_text(library.version)
            raise UnsupportedError(
                f"{title} {version} has no option {field}",
                hint=f"it came with NCCL {version_text(since)}: leave '{hint}' out, or install a newer one",
            )
        settings.append((field, value))
    return settings


def signals_of(hints: Mapping[str, Any], library: Library) -> int:
    """Returns the number of signal indices of a communicator: 1 if the library is older than the hint."""
    since = _FIELDS["num_rma_sig"][2]
    return (hints.get("num_rma_sig") or _SIGNALS) if library.version >= since else 1
