"""The command line `unicomm run ...`, whose ranks are forked from this process, which has torch already."""

import sys
from pathlib import Path


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.processes import forked_interpreters
    from unicomm.launch import cli

    forked_interpreters.nest()
    sys.argv[1:1] = ["run"]
    cli.main()


main()
