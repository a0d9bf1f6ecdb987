"""Options of a communicator of NCCL or RCCL: the fields of its config, under names like ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from unicomm import _core
from unicomm.comms.errors import UnsupportedError
from unicomm.comms.options import Hint

from .library import Library, version_text

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


def _split_by(text: str) -> str:
    if text not in ("split", "init"):
        raise ValueError("expected split or init")
    return text


HINTS = (
    Hint(
        "split_by",
        _split_by,
        "split",
        "How split makes communicators: split, by the library, which takes every rank of the parent; "
        "init, anew, which takes the members only.",
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
