"""Python objects between ranks.

Objects travel as bytes of `torch.save` and are read by `torch.load(weights_only=True)`: tensors, numbers,
text, bytes, None and containers of them, and whatever was registered with
`torch.serialization.add_safe_globals`. Nothing in a message can then execute code. Two other codecs take any
object that pickle takes, and execute what the sender wants; use them among ranks you trust: `codec="trusted"`
is the same bytes, read with `weights_only=False`, and `codec="pickle"` is pickle's, which is smaller.

`comm` is the communicator, `root`, `src` and `dst` are its ranks, `codec` is "safe", "trusted" or "pickle",
the same on all ranks. `timeout` of a function is that of each operation that it consists of.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any

import torch

from unicomm.comms.operations.table import OPERATIONS

from .errors import MismatchError, first_line
from .options import Timeout

if TYPE_CHECKING:
    from .communicator import Communicator

_CODECS = ("safe", "trusted", "pickle")


def _begin(comm: Communicator, op: str, codec: str, root: Any = None) -> int:
    """Checks what all functions take; returns the root."""
    if codec not in _CODECS:
        comm._engine.invalid(op, f"codec {codec!r} is unknown", f"one of {', '.join(_CODECS)}")
    return -1 if root is None else comm._engine.check.check_rank(OPERATIONS[op], "root", root)


def encoded(obj: Any, codec: str) -> bytes:
    """Returns the bytes in which an object travels."""
    if codec == "pickle":
        return pickle.dumps(obj)
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def _encode(comm: Communicator, op: str, obj: Any, codec: str) -> torch.Tensor:
    try:
        data = encoded(obj, codec)
        if codec == "safe":
            _decode_saved(data)  # here rather than at the receivers, where it would come too late
    except (pickle.PickleError, AttributeError, TypeError) as error:
        how = "safely" if codec == "safe" else "by pickle"
        comm._engine.invalid(
            op,
            f"a {type(obj).__name__} cannot travel {how}: {first_line(error)}",
            'register its class with torch.serialization.add_safe_globals, or pass codec="pickle"'
            if codec == "safe"
            else "pass what pickle takes: plain data, or objects of classes that a module defines",
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(comm.get_device())


def _decode_saved(data: bytes, weights_only: bool = True) -> Any:
    if weights_only:
        # b"" is written as a call of `bytes`; calls of `bytearray` torch allows by itself.
        torch.serialization.add_safe_globals([bytes])
    return torch.load(io.BytesIO(data), weights_only=weights_only, map_location="cpu")


def _decode(comm: Communicator, op: str, sender: int, data: torch.Tensor, codec: str) -> Any:
    raw = data.cpu().numpy().tobytes()
    try:
        return pickle.loads(raw) if codec == "pickle" else _decode_saved(raw, codec == "safe")
    except Exception as error:
        raise comm._engine.error(
            MismatchError,
            op,
            f"the object from rank {sender} cannot be read with codec '{codec}': {first_line(error)}",
            "pass the same codec= on all ranks; define or register the object's class on all of them",
            (sender,),
        ) from error


def _moves(comm: Communicator) -> bool:
    """Whether something arrives; otherwise lists keep what they hold, as tensors do."""
    return comm.get_capabilities().moves_data


def _memory() -> int:
    """Bytes that this host has: what claims to be larger is not believed."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _believe(comm: Communicator, op: str, claims: Mapping[int, int]) -> None:
    """Checks what ranks say that they send, in bytes, before any memory is taken for it.

    A claim that no memory holds ends the communicator: nobody knows what its sender does next.
    """
    most = _memory()
    liars = [sender for sender, size in claims.items() if not 0 <= size <= most]
    if not liars and sum(claims.values()) <= most:
        return
    liars = liars or [max(claims, key=lambda sender: claims[sender])]
    error = comm._engine.error(
        MismatchError,
        op,
        f"rank {liars[0]} says that its object has {claims[liars[0]]} bytes;"
        f" together {sum(claims.values())} are to come, and this host has {most}",
        "call the same function on all ranks; send large data as tensors, in parts",
        liars,
    )
    comm._engine.break_(error, comm._engine.backend.abort)
    raise error


def _numbers(comm: Communicator, numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=comm.get_device())


def _sizes(comm: Communicator, op: str, n: int, timeout: Timeout) -> list[int]:
    mine, everyone = _numbers(comm, [n]), _numbers(comm, [n] * comm.get_size())
    comm.all_gather_single(everyone, mine, False, None, timeout)
    sizes = [int(size) for size in everyone]
    _believe(comm, op, dict(enumerate(sizes)))
    return sizes


def _room(comm: Communicator, n: int) -> torch.Tensor:
    return torch.empty(n, dtype=torch.uint8, device=comm.get_device())


def _padded(comm: Communicator, data: torch.Tensor, size: int) -> torch.Tensor:
    whole = _room(comm, size)
    whole[: data.numel()] = data
    return whole


def all_gather_object(
    comm: Communicator,
    object_list: MutableSequence[Any],
    obj: Any,
    codec: str = "safe",
    timeout: Timeout = None,
) -> None:
    """Rank i's `obj` goes to `object_list[i]` on all ranks, which all call this."""
    _begin(comm, "all_gather", codec)
    _check_list(comm, "all_gather", object_list)
    data = _encode(comm, "all_gather", obj, codec)
    parts = [_room(comm, size) for size in _sizes(comm, "all_gather", data.numel(), timeout)]
    comm.all_gather_v(parts, data, False, None, timeout)
    if _moves(comm):
        object_list[:] = [_decode(comm, "all_gather", r, part, codec) for r, part in enumerate(parts)]


def gather_object(
    comm: Communicator,
    obj: Any,
    object_gather_list: MutableSequence[Any] | None = None,
    root: int = 0,
    codec: str = "safe",
    timeout: Timeout = None,
) -> None:
    """Rank i's `obj` goes to the root's `object_gather_list[i]`; the others pass None."""
    root = _begin(comm, "gather", codec, root)
    if comm.get_rank() == root:
        _check_list(comm, "gather", object_gather_list)
    data = _encode(comm, "gather", obj, codec)
    sizes = _sizes(comm, "gather", data.numel(), timeout)
    longest = max(sizes)
    padded = _padded(comm, data, longest)
    if comm.get_rank() != root:
        comm.gather([], padded, root, False, None, timeout)
        return
    parts = [_room(comm, longest) for _ in sizes]
    comm.gather(parts, padded, root, False, None, timeout)
    assert object_gather_list is not None
    if _moves(comm):
        object_gather_list[:] = [
            _decode(comm, "gather", r, parts[r][:size], codec) for r, size in enumerate(sizes)
        ]


def broadcast_object_list(
    comm: Communicator,
    object_list: MutableSequence[Any],
    root: int = 0,
    codec: str = "safe",
    timeout: Timeout = None,
) -> None:
    """Replaces the entries of `object_list` by the root's. Lists have the same length on all ranks."""
    root = _begin(comm, "broadcast", codec, root)
    header, data = _numbers(comm, [0, 0]), None
    if comm.get_rank() == root:
        data = _encode(comm, "broadcast", list(object_list), codec)
        header = _numbers(comm, [data.numel(), len(object_list)])
    comm.broadcast(header, root, False, None, timeout)
    size, length = (int(n) for n in header)
    if data is None:
        _believe(comm, "broadcast", {root: size})
        data = _room(comm, size)
    comm.broadcast(data, root, False, None, timeout)
    if not _moves(comm):
        return
    if length != len(object_list):
        comm._engine.invalid(
            "broadcast",
            f"object_list has {len(object_list)} entries, the root's {length}",
            "make the lists equally long",
        )
    object_list[:] = _decode(comm, "broadcast", root, data, codec)


def scatter_object_list(
    comm: Communicator,
    output_list: MutableSequence[Any],
    input_list: MutableSequence[Any] | None = None,
    root: int = 0,
    codec: str = "safe",
    timeout: Timeout = None,
) -> None:
    """The root's `input_list[i]` goes to rank i's `output_list[0]`. Called by all ranks."""
    root = _begin(comm, "scatter", codec, root)
    if not output_list:
        comm._engine.invalid("scatter", "output_list is empty", "pass a list with one entry, e.g. [None]")
    datas: list[torch.Tensor] = []
    if comm.get_rank() == root:
        _check_list(comm, "scatter", input_list)
        assert input_list is not None
        datas = [_encode(comm, "scatter", obj, codec) for obj in input_list]
    sizes = _numbers(comm, [d.numel() for d in datas] or [0] * comm.get_size())
    comm.broadcast(sizes, root, False, None, timeout)
    _believe(comm, "scatter", {root: int(sizes.min()) if int(sizes.min()) < 0 else int(sizes.max())})
    longest = int(sizes.max())
    mine = _room(comm, longest)
    comm.scatter(mine, [_padded(comm, data, longest) for data in datas], root, False, None, timeout)
    if _moves(comm):
        output_list[0] = _decode(comm, "scatter", root, mine[: int(sizes[comm.get_rank()])], codec)


def send_object_list(
    comm: Communicator,
    object_list: MutableSequence[Any],
    dst: int,
    codec: str = "safe",
    timeout: Timeout = None,
) -> None:
    """Sends the objects in `object_list` to rank `dst`, which calls `recv_object_list`."""
    _begin(comm, "send", codec)
    data = _encode(comm, "send", list(object_list), codec)
    comm.send(_numbers(comm, [data.numel()]), dst, False, None, timeout)
    comm.send(data, dst, False, None, timeout)


def recv_object_list(
    comm: Communicator,
    object_list: MutableSequence[Any],
    src: int,
    codec: str = "safe",
    timeout: Timeout = None,
) -> None:
    """Replaces the entries of `object_list` by those that rank `src` sends."""
    _begin(comm, "recv", codec)
    size = _numbers(comm, [0])
    comm.recv(size, src, False, None, timeout)
    _believe(comm, "recv", {src: int(size)})
    data = _room(comm, int(size))
    comm.recv(data, src, False, None, timeout)
    if _moves(comm):
        object_list[:] = _decode(comm, "recv", src, data, codec)


def _check_list(comm: Communicator, op: str, objects: object) -> None:
    n = comm.get_size()
    if not isinstance(objects, MutableSequence) or len(objects) != n:
        comm._engine.invalid(op, "the object list must have one entry per rank", f"pass [None] * {n}")
