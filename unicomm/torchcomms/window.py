"""Windows as torchcomms has them, over `unicomm.Window`."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NoReturn

import torch

from unicomm.comms.operations.arrays import Array
from unicomm.comms.options import Timeout
from unicomm.comms.window import Window, WindowAccess
from unicomm.comms.work import Work

from .options import Hints, check_hints


class TorchCommWinAccessType(enum.Enum):
    """Whether a rank can address the memory of another rank's window."""

    WIN_ACCESS_TYPE_UNIFIED = 0
    WIN_ACCESS_TYPE_SEPARATE = 1


@dataclass
class TorchCommWindowAttr:
    """What `TorchCommWindow.get_attr` returns."""

    access_type: TorchCommWinAccessType = TorchCommWinAccessType.WIN_ACCESS_TYPE_UNIFIED


_ACCESS = {
    WindowAccess.UNIFIED: TorchCommWinAccessType.WIN_ACCESS_TYPE_UNIFIED,
    WindowAccess.SEPARATE: TorchCommWinAccessType.WIN_ACCESS_TYPE_SEPARATE,
}


class TorchCommWindow:
    """One-sided access to the other ranks' tensors. Made by `TorchComm.new_window` on all ranks."""

    def __init__(self, window: Window) -> None:
        self._window = window

    def __copy__(self) -> TorchCommWindow:
        return self

    # --- the tensor -------------------------------------------------------------------------------------

    def tensor_register(self, tensor: Array, owning: bool = True) -> None:
        """See `unicomm.Window.tensor_register`. The window keeps the tensor, whatever `owning` says."""
        self._window.tensor_register(tensor)

    def tensor_deregister(self) -> None:
        """See `unicomm.Window.tensor_deregister`."""
        self._window.tensor_deregister()

    def free(self) -> None:
        """Frees the window's own memory, which torchcomms frees with the object. Collective."""
        self._window.free()

    def get_tensor(self) -> torch.Tensor | None:
        return self._window.get_tensor()

    def get_size(self) -> int:
        """Bytes of the registered tensor; 0 without one."""
        return self._window.get_size()

    @property
    def dtype(self) -> torch.dtype:
        return self._registered().dtype

    @property
    def shape(self) -> list[int]:
        return list(self._registered().shape)

    @property
    def device(self) -> torch.device:
        return self._registered().device

    def _registered(self) -> torch.Tensor:
        return self._window._registered("new_window")

    def get_attr(self, peer_rank: int) -> TorchCommWindowAttr:
        return TorchCommWindowAttr(_ACCESS[self._window.get_attr(peer_rank).access_type])

    def map_remote_tensor(self, rank: int) -> torch.Tensor:
        """See `unicomm.Window.map_remote_tensor`."""
        return self._window.map_remote_tensor(rank)

    # --- operations -------------------------------------------------------------------------------------

    def put(
        self,
        tensor: Array,
        dst_rank: int,
        target_offset_nelems: int,
        async_op: bool,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """See `unicomm.Window.put`."""
        check_hints(hints)
        return self._window.put(tensor, dst_rank, target_offset_nelems, async_op, None, timeout)

    def signal(self, peer_rank: int, async_op: bool, hints: Hints = None, timeout: Timeout = None) -> Work:
        """See `unicomm.Window.signal`."""
        check_hints(hints)
        return self._window.signal(peer_rank, async_op, None, timeout)

    def wait_signal(
        self, peer_rank: int, async_op: bool, hints: Hints = None, timeout: Timeout = None
    ) -> Work:
        """See `unicomm.Window.wait_signal`."""
        check_hints(hints)
        return self._window.wait_signal(peer_rank, async_op, None, timeout)

    # --- not here ---------------------------------------------------------------------------------------

    def get_device_window(
        self, signal_count: int = -1, counter_count: int = -1, barrier_count: int = 1
    ) -> NoReturn:
        """Raises `UnsupportedError`: torchcomms' kernels take a handle of its own library."""
        self._lacks("get_device_window")

    def register_local_buffer(self, tensor: Array) -> NoReturn:
        """Raises `UnsupportedError`, as `get_device_window`."""
        self._lacks("register_local_buffer")

    def deregister_local_buffer(self, handle: int) -> NoReturn:
        """Raises `UnsupportedError`, as `get_device_window`."""
        self._lacks("deregister_local_buffer")

    def _lacks(self, what: str) -> NoReturn:
        self._window._engine.refuse(
            what, "torchcomms' device interface is not here", "kernels use unicomm.symm"
        )
