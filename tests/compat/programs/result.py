"""What the programs of this folder share: how they tell what came out, and a folder for checkpoints."""

import contextlib
import hashlib
import json
import shutil
import tempfile

import torch.distributed as dist


@contextlib.contextmanager
def shared_folder():
    """A new folder, the same for all ranks, until the last of them leaves."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    yield name[0]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(name[0])


def report(losses, weights=None):
    """Rank 0 prints the losses, a digest of `weights` (a state dict), and the class of its default group."""
    if dist.get_rank() != 0:
        return
    digest = hashlib.sha256()
    for value in (weights or {}).values():
        digest.update(value.detach().cpu().contiguous().view(-1).numpy().tobytes())
    found = {
        "losses": [float(x) for x in losses],
        "weights": digest.hexdigest() if weights else "",
        "group": type(dist.group.WORLD).__name__,
    }
    print("RESULT " + json.dumps(found), flush=True)
