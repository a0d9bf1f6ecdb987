"""The command line `unicomm run ...`, in a process that has torch already."""

import sys

from unicomm.launch.cli import main

sys.argv[1:1] = ["run"]
main()
