from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unicomm.comms.errors import InvalidArgumentError
from unicomm.comms.membership.environment import LAUNCHERS, Environment, detect_environment

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-host-17@1",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BATCH = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "9",
    "SLURM_NPROCS": "9",
}
SRUN = {
    **BATCH,
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "8",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "9",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
}
PALS = {"PALS_RANKID": "2", "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "2", "PALS_APID": "app"}
METHOD = "TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, None, None, "single process", "")),
        ({"RANK": "", "WORLD_SIZE": ""}, (0, 1, None, None, "single process", "")),
        ({"TORCHCOMM_RANK": "1", "TORCHCOMM_SIZE": "2"}, (1, 2, None, None, "TORCHCOMM_RANK", "")),
        (TORCHRUN, (5, 8, 1, 4, "torchrun", "run/2")),
        (OPEN_MPI, (1, 2, 1, 2, "Open MPI", "prterun-host-17@1")),
        (MPICH, (3, 4, 1, 2, "PMI", "")),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4, None, None, "PMI", "")),
        ({"PMIX_RANK": "1", "PMIX_SIZE": "2", "PMIX_NAMESPACE": "n"}, (1, 2, None, None, "PMIx", "n")),
        ({**PALS, "PALS_SIZE": "4"}, (2, 4, 0, 2, "PALS", "app")),
        ({**PALS, "PALS_NRANKS": "4"}, (2, 4, 0, 2, "PALS", "app")),
        ({**PALS, "PMI_SIZE": "4"}, (2, 4, 0, 2, "PALS", "app")),
        ({**PALS, "PMI_RANK": "2", "PMI_SIZE": "4"}, (2, 4, 0, 2, "PMI", "app")),
        (SRUN, (8, 9, 0, 1, "Slurm", "77/3")),
        ({**SRUN, "SLURM_NODEID": "1", "SLURM_LOCALID": "3"}, (8, 9, 3, 4, "Slurm", "77/3")),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "?"}, (8, 9, 0, None, "Slurm", "77/3")),
        ({"RANK": "0", "WORLD_SIZE": "2"}, (0, 2, None, None, "RANK/WORLD_SIZE", "")),
        # One process, although the job has many tasks: only srun starts them.
        (BATCH, (0, 1, None, None, "single process", "")),
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "9"}, (0, 1, None, None, "single process", "")),
        ({**SRUN, "SLURM_STEP_ID": "4294967290"}, (0, 1, None, None, "single process", "")),
        # The inner launcher goes before the outer one, and what a person sets before all.
        ({**SRUN, **TORCHRUN}, (5, 8, 1, 4, "torchrun", "run/2")),
        ({**OPEN_MPI, **TORCHRUN}, (5, 8, 1, 4, "torchrun", "run/2")),
        ({**SRUN, **OPEN_MPI}, (1, 2, 1, 2, "Open MPI", "prterun-host-17@1")),
        ({**BATCH, **MPICH}, (3, 4, 1, 2, "PMI", "")),
        (
            {**TORCHRUN, "TORCHCOMM_RANK": "0", "TORCHCOMM_SIZE": "3"},
            (0, 3, None, None, "TORCHCOMM_RANK", ""),
        ),
        # srun with PMI or PMIx: what one leaves out, the other knows.
        ({**SRUN, "PMI_RANK": "8", "PMI_SIZE": "9"}, (8, 9, 0, 1, "PMI", "")),
        ({**SRUN, "PMIX_RANK": "8"}, (8, 9, 0, 1, "Slurm", "77/3")),
        # mpiexec has used srun to start its daemons: their place is not that of the ranks.
        ({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "9"}, (1, 9, None, None, "PMI", "")),
    ],
)
def test_launchers(environ: dict[str, str], expected: tuple[Any, ...]) -> None:
    assert detect_environment(environ) == Environment(*expected)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0"}, "RANK is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but RANK is not"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK is set, but PMIX_SIZE is not"),
        ({"PALS_RANKID": "0"}, "PALS_RANKID is set, but PALS_SIZE or PALS_NRANKS or PMI_SIZE is not"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE is set, but PMI_RANK is not"),
        ({**TORCHRUN, "TORCHCOMM_SIZE": "2"}, "TORCHCOMM_SIZE is set, but TORCHCOMM_RANK is not"),
        ({**OPEN_MPI, "TORCHELASTIC_RUN_ID": "x", "RANK": "0"}, "RANK is set, but WORLD_SIZE is not"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK='zero' is not a number"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "2.0"}, "OMPI_COMM_WORLD_SIZE='2.0' is not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK=2 is not in range \[0, 2\).*WORLD_SIZE"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, r"RANK=-1 is not in range"),
        ({**MPICH, "MPI_LOCALRANKID": "2"}, "local rank 2 of 2 does not fit 4 ranks"),
        ({**MPICH, "MPI_LOCALNRANKS": "5"}, "local rank 1 of 5 does not fit 4 ranks"),
    ],
)
def test_variables_that_make_no_sense(environ: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        detect_environment(environ)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("method", "source"),
    [
        ("auto", "Open MPI"),
        ("mpi", "Open MPI"),
        ("MPI", "Open MPI"),
        ("pmi", "PMI"),
        ("pals", "PALS"),
        ("slurm", "Slurm"),
        ("env", "RANK/WORLD_SIZE"),
        ("torchrun", "RANK/WORLD_SIZE"),
    ],
)
def test_query_method(method: str, source: str) -> None:
    everything = {**MPICH, **OPEN_MPI, **PALS, **SRUN, "RANK": "0", "WORLD_SIZE": "4", METHOD: method}
    assert detect_environment(everything).source == source
    assert detect_environment({**everything, "TORCHCOMM_RANK": "0", "TORCHCOMM_SIZE": "2"}).size == 2


def test_query_method_that_finds_nothing() -> None:
    with pytest.raises(InvalidArgumentError, match=f"{METHOD}=mpi, but"):
        detect_environment({**SRUN, METHOD: "mpi"})
    with pytest.raises(InvalidArgumentError, match=f"{METHOD}=magic is unknown") as caught:
        detect_environment({**SRUN, METHOD: "magic"})
    assert "torchrun" in caught.value.hint
    assert detect_environment({"TORCHCOMM_RANK": "0", "TORCHCOMM_SIZE": "2", METHOD: "manual"}).size == 2


RECORDED = sorted((Path(__file__).parent / "environments").glob("*.json"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_environments(path: Path) -> None:
    """What launchers really set, alone and one inside the other; each file says where it comes from."""
    recorded = json.loads(path.read_text())
    assert recorded["source"].startswith(("recorded with ", "written from "))
    found = [detect_environment(rank["environment"]) for rank in recorded["ranks"]]
    assert found == [Environment(*rank["expected"]) for rank in recorded["ranks"]]
    assert [here.rank for here in found] == list(range(len(found)))


def test_all_launchers_are_recorded() -> None:
    found = {rank["expected"][4] for path in RECORDED for rank in json.loads(path.read_text())["ranks"]}
    # Without a record: PMIx alone, whose variables have no size, and PALS, which sets those of PMI as well.
    assert found >= {row.name for row in LAUNCHERS} - {"TORCHCOMM_RANK", "PMIx", "PALS"}
