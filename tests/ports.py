"""Ports for what has to know its port before it listens."""

import random
import socket


def free_port(host: str = "127.0.0.1") -> int:
    """A port at which nobody listens, out of those that the kernel gives to nobody by itself.

    Another test's connection, which the kernel gives a port, can so never take it meanwhile.
    """
    for _ in range(100):
        port = random.SystemRandom().randrange(12000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port at {host}")
