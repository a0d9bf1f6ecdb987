"""Arrays of other libraries as tensors on the same memory: numpy's, and arrays with DLPack such as cupy's.

Only this module turns an argument that is no tensor into one. Writes to the tensor are writes to the array.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

_READ_ONLY, _COPIED = 1, 2  # bits of DLManagedTensorVersioned::flags
_VERSIONED = b"dltensor_versioned"
#: Packages whose arrays nobody may write to and do not say so: JAX passes DLPack's older form, without flags.
_IMMUTABLE = frozenset({"jax", "jaxlib"})
_FLAGS_AT = 24  # behind the version and two pointers
_api = ctypes.pythonapi
_is_valid, _pointer = _api.PyCapsule_IsValid, _api.PyCapsule_GetPointer
_is_valid.argtypes = _pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_pointer.restype = ctypes.c_void_p


class SupportsDLPack(Protocol):
    """An array of any library: https://dmlc.github.io/dlpack/latest/python_spec.html."""

    def __dlpack__(self, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


#: What operations take: a tensor, or an array whose memory they use in place.
Array = torch.Tensor | NDArray[Any] | SupportsDLPack


class NoTensorError(ValueError):
    """An array whose memory cannot be used in place. `hint` says what to do about it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def is_array(value: object) -> bool:
    """Whether the value is a numpy array or has DLPack, which tensors also have."""
    return isinstance(value, np.ndarray) or hasattr(type(value), "__dlpack__")


def as_tensor(array: Any, writes: bool) -> torch.Tensor:
    """A tensor on the array's memory, which the tensor keeps alive. Raises `NoTensorError`.

    Args:
        writes: whether the tensor will be written to; then a read-only array is refused.
    """
    return _from_numpy(array, writes) if isinstance(array, np.ndarray) else _from_dlpack(array, writes)


class _Readable:
    """Makes numpy view a read-only array as a writable one. The array is only read here, and torch warns of
    read-only arrays."""

    def __init__(self, array: NDArray[Any]) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.array = array


def _from_numpy(array: NDArray[Any], writes: bool) -> torch.Tensor:
    if any(stride < 0 for stride in array.strides):
        raise NoTensorError("runs backwards through its memory", "pass numpy.ascontiguousarray(array)")
    if not array.flags.writeable:
        if writes:
            raise NoTensorError(
                "is read-only", "pass a writable array, such as array.copy(), for what is written to"
            )
        array = np.asarray(_Readable(array))
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise NoTensorError(
            f"is of dtype {array.dtype} and cannot be a tensor: {error}",
            "convert it with array.astype(...): numbers in the machine's byte order",
        ) from error


class _Exporter:
    """Wraps an array while torch imports it, and keeps the flags of the exported memory."""

    def __init__(self, array: SupportsDLPack) -> None:
        self._array = array
        self.flags = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **kwargs: Any) -> Any:
        capsule = self._array.__dlpack__(**kwargs)
        if _is_valid(capsule, _VERSIONED):
            at = _pointer(capsule, _VERSIONED) + _FLAGS_AT
            self.flags = ctypes.c_uint64.from_address(at).value
        return capsule


def _from_dlpack(array: SupportsDLPack, writes: bool) -> torch.Tensor:
    if writes and type(array).__module__.partition(".")[0] in _IMMUTABLE:
        raise NoTensorError(
            "is immutable, as all arrays of JAX are",
            "receive into a tensor or a numpy array, then call jax.numpy.asarray",
        )
    exporter = _Exporter(array)
    try:
        tensor = from_dlpack(exporter, copy=False)
    except Exception as error:  # whatever the other library raises
        raise NoTensorError(
            f"does not give its memory: {type(error).__name__}: {error}",
            "pass a contiguous array that is detached, and on the communicator's device",
        ) from error
    if writes and exporter.flags & (_READ_ONLY | _COPIED):
        what = "is read-only" if exporter.flags & _READ_ONLY else "gives a copy of its memory only"
        raise NoTensorError(what, "pass a writable array, or a tensor, for what is written to")
    return tensor
