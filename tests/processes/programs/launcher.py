"""A launcher like mpiexec: starts a script N times, each with the variables it tells its ranks by, and waits.

    launcher.py N TEMPLATE SCRIPT ARGUMENT...

TEMPLATE is JSON: variables whose values may hold {rank} and {size}. The exit code is the highest of all.
"""

import json
import os
import runpy
import sys

if __name__ == "__main__":
    size, template, script = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
    children = []
    for rank in range(size):
        if (child := os.fork()) == 0:
            os.environ.update({name: text.format(rank=rank, size=size) for name, text in template.items()})
            sys.argv = sys.argv[3:]
            runpy.run_path(script, run_name="__main__")
            sys.exit()
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
