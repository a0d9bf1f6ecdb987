"""One start of mpiexec for many cases: those that work, then those that fail."""

import mpi_faults
import mpi_healthy
from mpi_common import me, run

run(me, [*mpi_healthy.CASES, *mpi_faults.CASES])
