"""How the programs of this folder tell what came out."""

import hashlib
import json

import torch.distributed as dist


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
