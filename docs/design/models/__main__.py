"""Checks all models: `python -m docs.design.models [--large] [--mutants] [NAME ...]`.

Exit code 1 if a model has a violation; with --mutants, if one has none.
"""

from __future__ import annotations

import argparse
import sys

from . import deadlock, fault_channel, first_cause, reconfigure, rendezvous, shm_rounds, wake_up
from .checker import Protocol, check

PROTOCOLS: dict[str, Protocol] = {
    module.PROTOCOL.name: module.PROTOCOL
    for module in (shm_rounds, wake_up, deadlock, fault_channel, first_cause, rendezvous, reconfigure)
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.design.models", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROTOCOLS)}; all by default")
    parser.add_argument("--large", action="store_true", help="the large bound, which takes minutes")
    parser.add_argument(
        "--mutants", action="store_true", help="the protocols without a line each, and what happens"
    )
    options = parser.parse_args()
    if unknown := set(options.names) - set(PROTOCOLS):
        parser.error(f"no protocol is called {', '.join(sorted(unknown))}")
    good = True
    states = transitions = 0
    seconds = 0.0
    for protocol in [PROTOCOLS[name] for name in options.names or PROTOCOLS]:
        models = list(protocol.large() if options.large else protocol.small())
        if options.mutants:
            models = [protocol.mutant(name) for name in protocol.variants]
        for at, model in enumerate(models):
            result = check(model)
            good &= bool(result.violation) if options.mutants else result.ok
            states, transitions = states + result.states, transitions + result.transitions
            seconds += result.seconds
            if options.mutants:
                print("\nVariant '{}': {}".format(*list(protocol.variants.items())[at]))
            print(result.summary(), result.table(), sep="\n" if result.run else "", flush=True)
    print(f"{states} states, {transitions} steps, {seconds:.1f} s: {'all as expected' if good else 'FAILED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
