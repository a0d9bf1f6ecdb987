"""Prints what it was given, as JSON, a line a rank; needs no torch. Ends with the code that it is told."""

import json
import os
import sys

names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "UNICOMM_BACKEND", "UNICOMM_TRACE_DIR", "UNICOMM_JOB_TOKEN")
names += ("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "TORCHELASTIC_RUN_ID")
print(json.dumps({"argv": sys.argv[1:]} | {name: os.environ.get(name) for name in names}), flush=True)
sys.exit(int(sys.argv[1]))
