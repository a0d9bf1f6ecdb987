"""The call path of an operation: whose code its frames are, and which one is the user's own line.

The recorder (csrc/recorder/call_path.cpp) knows the folders of the process, and stores with each frame of a
ring whose it is. A dump only has names of files, so `whose_of` guesses from these.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

# Folders of torch with wrappers around the user's model or data.
TORCH_WRAPPERS = {
    "nn/parallel/": "DDP",
    "distributed/fsdp/": "FSDP",
    "distributed/_composable/": "FSDP",
    "distributed/tensor/": "DTensor",
    "distributed/pipelining/": "pipelining",
    "distributed/algorithms/": "DDP",
    "distributed/optim/": "torch.distributed.optim",
    "distributed/checkpoint/": "torch.distributed.checkpoint",
}
# Beginnings of files of installed packages that call the user's code, or are called in place of torch.
WRAPPERS = {
    "accelerate/": "accelerate",
    "deepspeed/": "DeepSpeed",
    "lightning/": "Lightning",
    "lightning_fabric/": "Lightning",
    "pytorch_lightning/": "Lightning",
    "transformers/trainer": "transformers",
    "typing_extensions": "typing_extensions",  # torch's deprecated functions
}
_PACKAGES = re.compile(r"/(?:site|dist)-packages/(?!.*/(?:site|dist)-packages/)")
_HIDDEN = re.compile(
    r"/(?:site|dist)-packages/(?:unicomm|torchcomms)/|^<frozen |/lib/python3\.\d+/(?!(?:site|dist)-packages/)"
)
_WRITTEN_BY_TORCH = re.compile(r"^<eval_with_key>|/torchinductor_")
_TORCH = "/torch/"


class Whose(enum.IntEnum):
    """Whose code a frame is. Rings hold these numbers (csrc/recorder/ring.hpp), except HIDDEN."""

    USER = 0
    WRAPPER = 1
    TORCH = 2
    HIDDEN = 3  # ours, or of Python's standard library


@dataclass(frozen=True)
class Frame:
    """A line of a program, and whose it is."""

    function: str
    file: str
    line: int
    whose: Whose = Whose.USER

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def library(self) -> str:
        """The name of the wrapper that the frame belongs to; "torch" for torch's; "" for the user's."""
        if self.whose is Whose.WRAPPER:
            return _wrapper(self.file) or "wrapper"
        return "torch" if self.whose is Whose.TORCH else ""


CallPath = tuple[Frame, ...]  # the innermost call first


def _wrapper(file: str) -> str:
    if installed := _PACKAGES.search(file):
        inside = file[installed.end() :]
        for package, name in WRAPPERS.items():
            if inside.startswith(package):
                return name
    _, found, inside = file.rpartition(_TORCH)
    if found:
        for folder, name in TORCH_WRAPPERS.items():
            if inside.startswith(folder):
                return name
    return ""


def whose_of(file: str) -> Whose:
    """Returns whose code a file is, by its name."""
    if _wrapper(file):
        return Whose.WRAPPER
    if _TORCH in file or _WRITTEN_BY_TORCH.search(file):
        return Whose.TORCH
    return Whose.HIDDEN if _HIDDEN.search(file) else Whose.USER


@lru_cache(1 << 16)
def frame_in(file: str, function: str, line: int) -> Frame:
    """Returns a frame of a dump, which does not say whose it is."""
    return Frame(function, file, line, whose_of(file))


def user_frame(path: Sequence[Frame]) -> Frame | None:
    """Returns the user's own line: the innermost frame of the user, else the innermost frame."""
    for frame in path:
        if frame.whose is Whose.USER:
            return frame
    return path[0] if path else None
