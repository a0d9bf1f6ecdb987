"""What NCCL's result codes and last words mean, and what to do about it."""

from __future__ import annotations

import re

from unicomm.comms.errors import AbortedError, BackendError, CommError, PeerLostError

SUCCESS, IN_PROGRESS = 0, 7
_REMOTE = 6
_NAMES = {
    1: "unhandled device error",
    2: "unhandled system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote error",
    8: "timeout",
}

# What is found in the library's own words -> what to do. The first that fits is taken. Causes and cures are
# those of NCCL's troubleshooting guide and of threads where the cause was found, put in our words.
_CURES: tuple[tuple[str, str], ...] = (
    (
        r"driver version is insufficient|no CUDA-capable device|CUDA driver|hipErrorNoDevice",
        "no usable GPU driver here: compare what `nvidia-smi` (or `rocm-smi`) says with torch's version",
    ),
    (
        r"[Dd]uplicate GPU",
        "two ranks use the same GPU: give each its own, torch.device('cuda', local_rank)",
    ),
    (
        r"invalid device ordinal",
        "the device index is beyond the GPUs that CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES) leaves",
    ),
    (
        r"out of memory|cudaErrorMemoryAllocation|hipErrorOutOfMemory",
        "the GPU has no memory left for the library's buffers: allocate less, or pass the hint max_ctas",
    ),
    (
        r"/dev/shm|[Ss]hared memory|shm_open|No space left on device",
        "/dev/shm is full or too small: in a container start it with --shm-size or --ipc=host",
    ),
    (
        r"Bootstrap : no socket interface|no socket interface found",
        "no network interface fits: set NCCL_SOCKET_IFNAME to the one that joins the hosts",
    ),
    (
        r"[Cc]onnection refused|Connection timed out|No route to host|Network is unreachable",
        "ranks cannot reach each other: check firewalls and NCCL_SOCKET_IFNAME on all hosts",
    ),
    (
        r"ibv_|IB verbs|ib_reg_mr|Cannot allocate memory.*mr",
        "InfiniBand: raise the limit on locked memory (ulimit -l unlimited), or compare NCCL_IB_DISABLE=1",
    ),
    (
        r"[Mm]ismatch|different version",
        "the ranks run different versions of the library: install the same torch on all hosts",
    ),
    (
        r"remote process exited|[Pp]eer.*closed|Connection closed",
        "another rank died or left: look at its output, and at `unicomm trace analyze` for which",
    ),
    (
        r"illegal memory access",
        "a kernel before this operation wrote out of bounds: run with CUDA_LAUNCH_BLOCKING=1 to find it",
    ),
)
_BY_RESULT = {
    1: "a kernel or the driver failed, perhaps before this operation: run with CUDA_LAUNCH_BLOCKING=1",
    2: "a call of the system failed: NCCL_DEBUG=WARN shows which; /dev/shm, limits and the network are usual",
    4: "please report this: arguments are checked before they reach the library",
    5: "please report this with the recorder's rings",
    _REMOTE: "another rank died or left: look at its output, and at `unicomm trace analyze` for which",
}


def cure(result: int, words: str) -> str:
    """What to do about it."""
    for pattern, hint in _CURES:
        if re.search(pattern, words):
            return hint
    return _BY_RESULT.get(result, "NCCL_DEBUG=INFO makes the library say more")


def error_of(library: str, what: str, result: int, words: str) -> CommError:
    """The error for a result other than success. `what` was called; `words`: the library's last ones."""
    name = _NAMES.get(result, f"result {result}")
    words = " ".join(words.split())
    said = f": {words}" if words else ""
    kind = PeerLostError if result == _REMOTE else BackendError
    return kind(f"{library} {what} failed with {name}{said}", hint=cure(result, words))


def aborted() -> AbortedError:
    return AbortedError("the communicator was aborted", hint="create a new one with unicomm.new_comm")
