"""The catalogue of known causes: for texts of NCCL and RCCL, what the user can do.

Sources are NCCL's and RCCL's own guides (troubleshooting, environment variables) and GitHub issues in which
the cause was found. The comment after a pattern is the number of such an issue in NVIDIA/nccl, or in the
repository that it names.
"""

from __future__ import annotations

import re

_PEER = "another rank died or left: `unicomm trace analyze` names it; look at its output"

# (pattern in the last error or the log, cure). The first pattern that matches is taken. So special patterns
# stand before general ones, causes before their consequences, and possible causes at the end.
CATALOGUE: tuple[tuple[str, str], ...] = (
    # --- driver and GPU ------------------------------------------------------------------------------------
    (
        r"Failed to find CUDA library|libcuda\.so|libamdhip64",
        "the GPU driver's library cannot be found: start the container with its GPUs (docker run --gpus all,"
        " or --device /dev/kfd --device /dev/dri)",
    ),
    (
        r"forward compatibility was attempted|compat.*not supported",
        "the container's CUDA compatibility library does not fit this GPU or driver: update the driver, or"
        " use an image for an older CUDA",
    ),
    (
        r"system not yet initialized|[Cc]uda failure 802",  # nccl-tests 264, 1788
        "NVSwitch is not set up: start the service nvidia-fabricmanager, of the driver's own version",
    ),
    (
        r"driver version is insufficient|no CUDA-capable device|CUDA driver|hipErrorNoDevice|no ROCm-capable",
        "no usable GPU driver here: compare the versions of `nvidia-smi` (or `rocm-smi`) and of torch",
    ),
    (
        r"/dev/kfd",
        "this user may not use the GPU: add the user to the groups render and video, and pass /dev/kfd and"
        " /dev/dri to the container",
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
        r"no kernel image|invalid device function|named symbol not found|hipErrorNoBinaryForGpu",
        "the library is not built for this GPU: install a torch that is",
    ),
    (
        r"uncorrectable|ECC error|[Uu]nspecified launch failure|GPU has fallen off|Xid",
        "the GPU or its links failed: look for Xid messages in `dmesg`, run `nvidia-smi -q -d ECC`, and take"
        " the GPU out of use if it repeats",
    ),
    (
        r"illegal memory access|misaligned address|device-side assert|illegal instruction",
        "a kernel before this operation wrote out of bounds: run with CUDA_LAUNCH_BLOCKING=1 to find it",
    ),
    (
        r"IMEX|MNNVL|cuMemImportFromShareableHandle|Cuda failure 101",  # 1647, dra-driver-nvidia-gpu 1417
        "GPUs cannot open each other's memory: ranks in different containers need all GPUs visible in each,"
        " and hosts that share NVLink need the service nvidia-imex; NCCL_MNNVL_ENABLE=0 and"
        " NCCL_CUMEM_ENABLE=0 switch this off",
    ),
    (
        r"nvls|NVLS|[Mm]ulticast",  # 976, 1672, 1788
        "NVLink multicast (NVLS) does not work: restart the host if nvidia-fabricmanager was restarted while"
        " GPUs were in use; NCCL_NVLS_ENABLE=0 switches it off",
    ),
    (
        r"[cC]udaIpc|hipIpc|peer mapping resources|peer access|transport/p2p",  # 360, 842, ROCm/rccl 2188
        "GPUs cannot map each other's memory: show all of a host's GPUs to each container, choose"
        " by torch.device; an IOMMU or PCI ACS may prevent it; NCCL_P2P_DISABLE=1 switches it off",
    ),
    (
        r"out of memory|cudaErrorMemoryAllocation|hipErrorOutOfMemory",
        "the GPU has no memory left for the library's buffers: allocate less, or pass the hint max_ctas",
    ),
    # --- the host ------------------------------------------------------------------------------------------
    (
        r"unlink shared memory .* failed",
        "somebody removed the library's files in /dev/shm: set RemoveIPC=no in /etc/systemd/logind.conf",
    ),
    (
        r"/dev/shm|[Ss]hared memory|shm_open|No space left on device",
        "/dev/shm is full or too small: start the container with --shm-size=1g (or --ipc=host) and"
        " --ulimit memlock=-1",
    ),
    (
        r"Too many open files",
        "no file descriptors are left: raise the limit (ulimit -n)",
    ),
    (
        r"pthread_create|Resource temporarily unavailable",
        "no more threads can be started: raise ulimit -u, and the container's limit (docker --pids-limit)",
    ),
    (
        r"set_mempolicy|get_mempolicy|NUMA.*not (?:supported|permitted)",
        "the container may not use NUMA: start it with --cap-add SYS_NICE, or set NCCL_CUMEM_HOST_ENABLE=0",
    ),
    # --- InfiniBand and RoCE -------------------------------------------------------------------------------
    (
        r"ibv_modify_qp",  # 2013, nccl-tests 185 and 227
        "network cards cannot reach each other: with RoCE choose NCCL_IB_GID_INDEX by `show_gids`; if only"
        " cards with the same number are connected, set NCCL_CROSS_NIC=0; NCCL_IB_HCA excludes cards",
    ),
    (
        r"completion.*(?:status=|error )(?:12|IBV_WC_RETRY_EXC)|vendor err 129",  # 426, 902, 1664
        "a network card got no answer in time: at the start check routes and NCCL_IB_GID_INDEX with"
        " ib_write_bw; later look for a dead host or a bad link, and compare a higher NCCL_IB_TIMEOUT",
    ),
    (
        r"completion.*(?:status=|error )(?:4|10|11)\b|ib_reg_mr|ibv_reg_dmabuf|ibv_reg_mr_iova",  # 214
        "a network card cannot reach the GPU's memory: load nvidia-peermem (or use dma-buf), disable PCI ACS;"
        " NCCL_NET_GDR_LEVEL=LOC switches this off",
    ),
    (
        r"ibv_reg_mr|ibv_create_(?:qp|cq)|Cannot allocate memory",
        "InfiniBand may not lock enough memory: set ulimit -l unlimited, docker --ulimit memlock=-1",
    ),
    (
        r"completion.*(?:status=|error )5\b",
        "messages were dropped after another error: the first one, on this or another rank, is the cause",
    ),
    (
        r"ibv_|IB verbs|NET/IB.*(?:async|event)",
        "InfiniBand failed: test it alone (ibstat, ib_write_bw), or compare NCCL_IB_DISABLE=1",
    ),
    # --- sockets -------------------------------------------------------------------------------------------
    (
        r"no socket interface",
        "no network interface fits: set NCCL_SOCKET_IFNAME to the one that connects the hosts",
    ),
    (
        r"message truncated|receiving \d+ bytes instead of|mismatch in collective",
        "the ranks called with different sizes or types, or differ in NCCL_ALGO, NCCL_PROTO or"
        " NCCL_BUFFSIZE: `unicomm trace analyze` shows what each rank called",
    ),
    (
        r"wrong type \d|mismatched magic|unexpected magic",
        "something else connected to the library's port, such as a scanner: choose another network by"
        " NCCL_SOCKET_IFNAME",
    ),
    (
        r"[Cc]onnection refused|Connection timed out|No route to host|Network is unreachable|Software caused",
        "ranks cannot reach each other: check firewalls and NCCL_SOCKET_IFNAME on all hosts",
    ),
    (r"remote process exited|[Pp]eer.*closed|Connection (?:closed|reset)|process has ended", _PEER),
    # --- settings ------------------------------------------------------------------------------------------
    (
        r"[Mm]ismatch|different version",
        "the ranks run different versions of the library: install the same torch on all hosts",
    ),
    (
        r"Invalid config|config.*(?:invalid|attribute)",
        "the library refuses one of the hints: `unicomm doctor` shows its version, docs/backends.md the"
        " hints",
    ),
    (
        r"Could not open XML|NCCL_TOPO_FILE|NCCL_GRAPH_FILE|NCCL_ALGO|NCCL_PROTO",
        "the library cannot use the value of an environment variable: unset the NCCL_* variables one by one",
    ),
    (
        r"communicator (?:was|is) (?:destroyed|aborted|finalized)|no live communicator",
        "the communicator was ended during a call: finalize it when no thread uses it any more",
    ),
    # --- warnings at start, which may have nothing to do with the error ---------------------------------
    (
        r"iommu=(?:pt|on)",
        "boot with iommu=pt on the kernel's command line: without it AMD GPUs may hang",
    ),
    (
        r"numa_balancing|NUMA auto balancing",
        "switch NUMA balancing off by `sysctl kernel.numa_balancing=0`: with it AMD GPUs may hang or be slow",
    ),
)

_BY_RESULT = {
    1: "a kernel or the driver failed, perhaps before this operation: run with CUDA_LAUNCH_BLOCKING=1",
    2: "a system call failed: NCCL_DEBUG=INFO shows which, often /dev/shm, limits or the network",
    4: "please report this: arguments are checked before they reach the library",
    5: "please report this with the flight recorder's rings",
    6: _PEER,
}


def known_cause(text: str) -> str:
    """Returns the cure for a text of the library, or "" if no pattern matches."""
    return next((cure for pattern, cure in CATALOGUE if re.search(pattern, text)), "")


def cure(result: int, text: str, log: str = "") -> str:
    """Returns the cure for a result code, given the library's last error and its log."""
    by_code = _BY_RESULT.get(result, "NCCL_DEBUG=INFO makes the library's log more detailed")
    return known_cause(text) or known_cause(log) or by_code
