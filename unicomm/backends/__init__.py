"""Backends: each moves validated buffers over one library, and nothing else.

registry.py    the names of backends, and `new_comm`
auto.py        chooses the fastest backend that reaches all ranks
shm.py         ranks of one host, over the native core's shared memory
gloo/          TCP, by torch's ProcessGroupGloo
tcp/           TCP, by connections of its own
ucx/           UCX: RDMA, TCP or what else it drives
hosts/         several hosts: shm within each, tcp (or ucx, or gloo) between them
mpi/           MPI, by mpi4py
nccl/          NCCL and RCCL
shmem/         NVSHMEM and rocSHMEM
fake.py        one process plays any rank of any size; moves nothing
transport/     shared: operations over a native transport, of tcp and ucx
out_of_band/   shared: connections beside a library's, for failures and signatures
bootstrap/     shared: how ranks find each other
vendor/        shared: opening GPU vendors' libraries

A backend imports the protocol (comms/backend.py), operations and failures, and what is shared here. Only
`auto` and `hosts` know other backends. The registry imports a backend when its name is first used.
"""
