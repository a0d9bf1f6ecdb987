"""One start of mpiexec for many cases: those that work, then those that fail."""

from tests.backends.mpi.programs import mpi_faults, mpi_healthy
from tests.backends.mpi.programs.mpi_common import me, run

run(me, [*mpi_healthy.CASES, *mpi_faults.CASES])
