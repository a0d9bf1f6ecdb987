"""Options of a communicator of NCCL or RCCL: the fields of its config, under names like ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from unicomm import _core
from unicomm.comms.errors import UnsupportedError
from unicomm.comms.options import Hint

from .library import Library, version_text
from .symmetric import AUTO, TABLES

_SIGNALS = 8  # indices of one-sided signals that a communicator asks for, where the library lets it choose

_MEANING = {
    "blocking": "0: the library's calls return at once, and are asked for their end. Default: 1.",
    "cga_cluster_size": "Thread blocks in a cluster, 0 to 8.",
    "min_ctas": "Fewest thread blocks for an operation, 1 to 32.",
    "max_ctas": "Most thread blocks for an operation, 1 to 32: fewer leave more of the GPU to computation.",
    "net_name": "Name of the network plugin to use, such as IB or Socket.",
    "split_share": "1: communicators split from this one share its resources.",
    "traffic_class": "Traffic class of its messages on InfiniBand.",
    "comm_name": "Name in the library's own log. Default: the communicator's.",
    "nvls_ctas": "Thread blocks for NVLink SHARP.",
    "num_rma_sig": f"Counters of signals for each pair of ranks: one for puts, one for each window. "
    f"Default: {_SIGNALS}.",
}


def _name(field: str) -> str:
    """minCTAs -> min_ctas"""
    words = re.sub(r"CTAs", "Ctas", re.sub(r"CTA(?!s)", "Cta", field))
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", words).lower()


_FIELDS = {_name(field): (field, text, since) for field, text, since in _core.nccl_config_fields()}


def _whole(text: str) -> int:
    value = int(text)
    if not -(1 << 31) < value < 1 << 31:
        raise ValueError("expected a number of 32 bits")
    return value


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


# All ranks of a world connect to its root one after the other, so NCCL's guide gives several unique ids where
# there are hundreds of ranks. Where it begins to pay was not measured here.
_LARGE = 256

HINTS = (
    Hint(
        "symmetric",
        _one_of(AUTO, *TABLES),
        AUTO,
        "What symmetric memory is made of: cuda_ipc, device memory that the processes of one host open; "
        "windows, the library's own (NCCL since 2.29.2); nvshmem, NVSHMEM's heap. Default: auto, cuda_ipc "
        "where all ranks are on one host, else windows.",
    ),
    Hint(
        "large_world",
        _ranks,
        _LARGE,
        "From how many ranks on they meet at several roots (CommInitRankScalable, since NCCL 2.23), one for "
        f"64 ranks, at least 2. Default: {_LARGE}.",
    ),
    Hint(
        "split_by",
        _one_of("split", "init"),
        "split",
        "How split makes communicators: split, by the library, which takes every rank of the parent; "
        "init, anew, which takes the members only.",
    ),
    Hint(
        "reconfigure_by",
        _one_of("shrink", "init"),
        "shrink",
        "How reconfigure makes communicators: shrink, by the library's shrinking and growing where it can; "
        "init, always anew.",
    ),
    *(
        Hint(
            name,
            str if text else _whole,
            None,
            _MEANING.get(name, f"{field} of the library's config, since NCCL {version_text(since)}."),
        )
        for name, (field, text, since) in _FIELDS.items()
    ),
)


def settings_of(hints: Mapping[str, Any], name: str, library: Library) -> list[tuple[str, Any]]:
    """What goes into the library's config. Raises `UnsupportedError` for what the library is too old for."""
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
    """How many indices of one-sided signals a communicator with these hints has: one, before they were."""
    since = _FIELDS["num_rma_sig"][2]
    return (hints.get("num_rma_sig") or _SIGNALS) if library.version >= since else 1
