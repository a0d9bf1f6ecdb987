"""Hosts on one machine: each has a network and process numbers of its own, so that ranks share no memory.

    with Namespaces(2) as hosts:
        process = subprocess.Popen([*hosts.enter(1), sys.executable, "rank.py"], env=...)

Needs root and the commands `ip`, `unshare` and `nsenter`; `why_not()` says what is missing. The hosts are
joined by a bridge in a namespace of its own, and touch neither this machine's network nor each other's
loopback. At the end of the block the namespaces are removed, and the processes in them are ended.
"""

from __future__ import annotations

import functools
import secrets
import subprocess
from pathlib import Path

_SECONDS = 30.0  # that one command may take


@functools.cache
def why_not() -> str:
    """Why this machine cannot have such hosts; "" when it can."""
    try:
        with Namespaces(1) as hosts:
            subprocess.run([*hosts.enter(0), "true"], capture_output=True, check=True, timeout=_SECONDS)
    except FileNotFoundError as error:
        return f"there is no command '{error.filename}'"
    except subprocess.CalledProcessError as error:
        said = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        return f"{' '.join(error.cmd)}: {said[-1] if said else f'exit code {error.returncode}'}"
    except subprocess.TimeoutExpired as error:
        return f"{' '.join(error.cmd)} takes longer than {_SECONDS:g} s"
    return ""


class Namespaces:
    """`n` hosts, from 0. Raises `subprocess.CalledProcessError` when one cannot be made."""

    def __init__(self, n: int, only_ipv6: bool = False, congestion: str = "") -> None:
        """`only_ipv6`: the network between the hosts has no IPv4. `congestion`: TCP's congestion control in
        the hosts, such as reno; "" for this machine's default.
        """
        self._only_ipv6 = only_ipv6
        self._congestion = congestion
        key = secrets.token_hex(3)
        self.names = [f"uc{key}-{i}" for i in range(n)]
        self._middle = f"uc{key}-m"
        self._keepers: list[subprocess.Popen[str]] = []

    def address(self, host: int) -> str:
        """The address of a host on the network between them."""
        return f"fd00:77::{host + 1}" if self._only_ipv6 else f"10.77.0.{host + 1}"

    def first_process(self, host: int) -> int:
        """The process that a host begins with, as this process numbers it."""
        keeper = self._keepers[host].pid
        return int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0])

    def enter(self, host: int) -> list[str]:
        """What to put before a command that is to run on a host."""
        return ["nsenter", f"--target={self.first_process(host)}", "--net", "--pid", "--mount", "--"]

    def set_link(self, host: int, up: bool) -> None:
        """Cuts a host's link to the others, or restores it."""
        command("ip", "-n", self._middle, "link", "set", f"port{host}", "up" if up else "down")

    def __enter__(self) -> Namespaces:
        try:
            for name in (self._middle, *self.names):
                command("ip", "netns", "add", name)
                command("ip", "-n", name, "link", "set", "lo", "up")
            command("ip", "-n", self._middle, "link", "add", "bridge", "type", "bridge")
            command("ip", "-n", self._middle, "link", "set", "bridge", "up")
            for i, name in enumerate(self.names):
                port = f"port{i}"
                peer = ("peer", "name", port, "netns", self._middle)
                command("ip", "-n", name, "link", "add", "eth0", "type", "veth", *peer)
                command("ip", "-n", self._middle, "link", "set", port, "master", "bridge", "up")
                # Without nodad an IPv6 address cannot be used for its first second.
                address = [f"{self.address(i)}/64", "nodad"] if self._only_ipv6 else [f"{self.address(i)}/24"]
                command("ip", "-n", name, "addr", "add", *address, "dev", "eth0")
                command("ip", "-n", name, "link", "set", "eth0", "up")
                if self._congestion:
                    setting = f"net.ipv4.tcp_congestion_control={self._congestion}"
                    command("ip", "netns", "exec", name, "sysctl", "-qw", setting)
                self._keepers.append(_keeper(name))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for keeper in self._keepers:
            keeper.kill()  # with it goes the first process in there, and with that all others
            keeper.wait()
            assert keeper.stdout is not None
            keeper.stdout.close()
        for name in (*self.names, self._middle):
            command = ["ip", "netns", "del", name]
            subprocess.run(command, capture_output=True, check=False, timeout=_SECONDS)


def _keeper(name: str) -> subprocess.Popen[str]:
    """A process that holds a host's process numbers: the first one in there sleeps."""
    inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
    # The namespaces have no name service. Without a server in the file, no lookup waits for an answer.
    # Control groups for memory (version 1), which hosts have: `ip netns exec` mounts another /sys.
    first = (
        "[ ! -e /etc/resolv.conf ] || mount --bind /dev/null /etc/resolv.conf;"
        "(mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/memory &&"
        " mount -t cgroup -o memory none /sys/fs/cgroup/memory) 2>/dev/null;"
        "echo here; exec sleep infinity"
    )
    command = ["ip", "netns", "exec", name, *inside, "sh", "-c", first]
    keeper = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    if keeper.stdout.readline() != "here\n":
        keeper.kill()
        raise subprocess.CalledProcessError(keeper.wait(), command, stderr=keeper.stderr.read().encode())
    keeper.stderr.close()
    return keeper


def command(*words: str) -> None:
    """Runs a command. Raises `subprocess.CalledProcessError` when it fails."""
    subprocess.run(words, capture_output=True, check=True, timeout=_SECONDS)
