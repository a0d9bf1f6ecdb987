"""A rank's place in an MPI job: hands over what MPI needs, and waits until the rank has ended.

python mpi_place.py ADDRESS
"""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as nursery:
    nursery.connect(sys.argv[1])
    environment = json.dumps(dict(os.environ)).encode()
    socket.send_fds(nursery, [environment[:1]], [int(os.environ["PMI_FD"])])
    nursery.sendall(environment[1:])
    nursery.shutdown(socket.SHUT_WR)
    nursery.recv(1)
