"""`python -m unicomm`: the same as the command `unicomm`."""

from unicomm.launch.cli import main

if __name__ == "__main__":
    main()
