"""mpiexec over hosts that are network namespaces: its remote shell enters them instead of logging in."""

from __future__ import annotations

import shlex
from pathlib import Path

from tools.mpi_libraries import Library
from tools.namespaces import Namespaces

# Options of each launcher: the remote shell, the hosts, the processes on each host, and TCP over eth0.
_HYDRA = "-launcher ssh -launcher-exec {shell} -hosts {hosts} -ppn {ranks} -iface eth0"
_OPTIONS = {
    "Open MPI": (
        "--mca plm_rsh_agent {shell} --host {slots} --map-by slot --mca btl tcp,self,vader --mca pml ob1"
        " --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 --mca hwloc_base_binding_policy none"
    ),
    "MPICH": _HYDRA,
    "Intel MPI": _HYDRA,
}

#: UCX in MPICH would take a network namespace on the same machine for the same host.
ENVIRONMENT = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}


def command(library: Library, hosts: Namespaces, count: int, ranks: int, folder: str) -> list[str]:
    """Returns a command that starts `ranks` processes of a program on each host; the program follows.

    mpiexec runs in the network of the first host. `folder`: for the remote shell.
    """
    shell = Path(folder) / f"shell-{library.name.replace(' ', '-')}"
    shell.write_text(_remote_shell(hosts, count))
    shell.chmod(0o755)
    addresses = [hosts.address(host) for host in range(count)]
    options = _OPTIONS[library.name].format(
        shell=shell,
        hosts=",".join(addresses),
        slots=",".join(f"{address}:{ranks}" for address in addresses),
        ranks=ranks,
    )
    network = ["nsenter", f"--net=/var/run/netns/{hosts.names[0]}", "--"]
    return [*network, *library.command, *options.split(), "-n", str(count * ranks)]


def _remote_shell(hosts: Namespaces, count: int) -> str:
    """Returns a shell script with the arguments of ssh: options, the host, and the words of a command line.

    Each host gets a host name of its own, because MPI libraries let ranks with one host name share memory.
    """
    cases = [
        f"{hosts.address(host)}) set -- {shlex.join([*hosts.enter(host), 'unshare', '--uts', '--'])}"
        f' sh -c \'hostname host{host}; exec sh -c "$0"\' "$line";;'
        for host in range(count)
    ]
    return "\n".join(
        [
            "#!/bin/sh",
            'while [ "${1#-}" != "$1" ]; do shift; done',
            'host=$1; shift; line="$*"',
            'case "$host" in',
            *cases,
            '*) echo "no host $host" >&2; exit 1;;',
            "esac",
            'exec "$@"',
            "",
        ]
    )
