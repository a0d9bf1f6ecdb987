"""install: the documented call after which programs that use torchcomms find unicomm."""

from unicomm.c10d import switch, torchcomms_import


def install() -> str:
    """Has `import torchcomms` find unicomm, and torch.distributed use it if a program asks for torchcomms.

    Afterwards `torch.distributed.config.use_torchcomms = True` sends `init_process_group` to unicomm. Each
    rank calls it, before the first `import torchcomms`. Doing it again changes nothing, and it does nothing
    beyond what `TORCH_DISTRIBUTED_USE_TORCHCOMMS=1` has done.

    Returns the reason if it has no effect on torch.distributed, else an empty text. The reason is the
    official torchcomms, which wins if it is installed, or a version of torch that unicomm does not know.
    """
    torchcomms_import.install()
    return switch.install()
