"""Object collectives with torchcomms' signatures, over `unicomm.objcol`.

`weights_only=False` reads any object, and executes what the sender wants. With the variable
TORCHCOMMS_SERIALIZATION=pickle all functions use pickle, whatever `weights_only` says.
"""

from __future__ import annotations

import os
from collections.abc import MutableSequence
from typing import Any

from unicomm.comms import objects
from unicomm.comms.options import Timeout

from .communicator import TorchComm


def _codec(weights_only: bool) -> str:
    if os.environ.get("TORCHCOMMS_SERIALIZATION") == "pickle":
        return "pickle"
    return "safe" if weights_only else "trusted"


def all_gather_object(
    comm: TorchComm,
    object_list: MutableSequence[Any],
    obj: object,
    timeout: Timeout = None,
    weights_only: bool = True,
) -> None:
    """Rank i's `obj` goes to `object_list[i]` on all ranks."""
    objects.all_gather_object(comm, object_list, obj, _codec(weights_only), timeout)


def gather_object(
    comm: TorchComm,
    obj: object,
    root: int,
    object_gather_list: MutableSequence[Any] | None = None,
    timeout: Timeout = None,
    weights_only: bool = True,
) -> None:
    """Rank i's `obj` goes to the root's `object_gather_list[i]`; the others pass None."""
    objects.gather_object(comm, obj, object_gather_list, root, _codec(weights_only), timeout)


def send_object_list(
    comm: TorchComm, object_list: MutableSequence[Any], dst: int, timeout: Timeout = None
) -> None:
    """Sends a list of objects to rank `dst`, which says whether it reads any object."""
    objects.send_object_list(comm, object_list, dst, _codec(False), timeout)


def recv_object_list(
    comm: TorchComm,
    object_list: MutableSequence[Any],
    src: int,
    timeout: Timeout = None,
    weights_only: bool = True,
) -> None:
    """Replaces the entries of `object_list` by those that rank `src` sends."""
    objects.recv_object_list(comm, object_list, src, _codec(weights_only), timeout)


def broadcast_object_list(
    comm: TorchComm,
    object_list: MutableSequence[Any],
    root: int,
    timeout: Timeout = None,
    weights_only: bool = True,
) -> None:
    """Replaces the entries of `object_list` by the root's."""
    objects.broadcast_object_list(comm, object_list, root, _codec(weights_only), timeout)


def scatter_object_list(
    comm: TorchComm,
    root: int,
    scatter_object_output_list: MutableSequence[Any],
    scatter_object_input_list: MutableSequence[Any] | None = None,
    timeout: Timeout = None,
    weights_only: bool = True,
) -> None:
    """The root's `scatter_object_input_list[i]` goes to rank i's `scatter_object_output_list[0]`."""
    objects.scatter_object_list(
        comm, scatter_object_output_list, scatter_object_input_list, root, _codec(weights_only), timeout
    )
