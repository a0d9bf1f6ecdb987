"""`rehearse`: runs a program as many ranks, plays their operations and judges them."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from unicomm.flight_recorder.analysis.verdict import Report
from unicomm.flight_recorder.formats.operation_names import OpKind
from unicomm.flight_recorder.ring.reader import InputRemark
from unicomm.flight_recorder.table.table import Table

from .forecast.forecast import Forecast, forecast
from .forecast.timeline import Timeline
from .forecast.topology import Topology
from .hash_seeds import explain, with_other_seeds
from .hollow.install import warm_up
from .hollow.memory import LEAST
from .hollow.rules import NotKnownError
from .imports import import_for, import_shared
from .judge import judge
from .play import Rules
from .rank import Job
from .ranks import run_ranks
from .recorded_table import end_remarks, read_details, read_remarks, read_table
from .values.recorded import read as recording_of
from .values.recorded import write as save_recording

RECORDS = 16384
#: The most ranks that get real values by default: so many processes of a small model fit into most machines.
MOST_REAL = 64
#: What torch says where it has no GPU.
_NO_GPU = re.compile("CUDA|Cannot access accelerator device|SyncBatchNorm .*GPU")
PATIENCE = 300.0


@dataclass
class Rehearsal:
    """The result of a rehearsal.

    Attributes:
        report: the analyzer's report on the schedule that was played. `report.good` says that all is well.
        table: the operations of that schedule.
        ranks: the ranks that were run.
        output: the output of the first rank.
        forecast: the figures for the topology asked for, None without one.
        unusable: why the rehearsal has no result, "" if it has one.
    """

    report: Report
    table: Table
    ranks: Sequence[int]
    output: str
    unusable: str = ""
    forecast: Forecast | None = None

    @property
    def good(self) -> bool:
        """Whether the operations of all ranks fit together, and no schedule hangs."""
        return self.report.good and not self.unusable


def rehearse(
    program: str | Path | Callable[[], object],
    ranks: int = 8,
    *,
    arguments: Sequence[str] = (),
    nnodes: int = 1,
    sample: bool = False,
    jobs: int | None = None,
    rules: Rules | None = None,
    real_values: bool | None = None,
    save_values: str | Path | None = None,
    recorded_values: str | Path | None = None,
    topology: Topology | None = None,
    bucket_cap_mb: float | None = None,
    meta: bool = False,
    hollow_from: int = LEAST,
    simulate_cuda: bool | None = None,
    records: int = RECORDS,
    patience: float = PATIENCE,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Rehearsal:
    """Runs `program` once for each rank, in forked processes that move no data, and judges the operations.

    Args:
        program: a Python file, or a function without arguments that stands for the program.
        ranks: the number of ranks of the whole job; a multiple of `nnodes`.
        sample: runs some ranks only, see `sample_of`.
        jobs: how many ranks run at a time; by default as many as this process may use cores, and one with
            real values.
        real_values: whether the ranks receive what others have sent. All ranks are then alive at once, each
            waits for the data that it needs, and the data is kept in files until the end. The default is to
            do so for up to `MOST_REAL` ranks, except for a sample, a forecast, recorded values or `meta`.
        save_values: a file to write, with the small values that ranks have received; needs `real_values`.
        recorded_values: such a file, from a rehearsal with fewer ranks, whose values count instead of
            made-up ones.
        topology: forecasts the times of the communication on these links.
        bucket_cap_mb: the size of DDP's buckets, whatever the program says.
        meta: whether tensors of `hollow_from` or more bytes have no data, so that models fit that are larger
            than the memory. Operations on them give tensors of the right layout. Small results of them, such
            as losses, are made up. Not with real values.
        simulate_cuda: whether the program finds as many GPUs as a node has ranks, whose tensors are on the
            CPU; by default if the machine has no GPU.
        records: the operations of a rank that are kept. patience: seconds that a rank may take.
        progress: called with the number of ranks that are over and that are to be run.

    Raises `ValueError` if `ranks` is not a multiple of `nnodes`, if real values are asked of a sample or
    with `meta`, or for a file without recorded values; `FileNotFoundError` without the program, or that file.
    """
    if ranks < 1 or ranks % nnodes:
        raise ValueError(f"{ranks} ranks cannot be spread over {nnodes} nodes")
    if real_values is None:
        others = sample or meta or topology is not None or recorded_values is not None
        real_values = not others and (ranks <= MOST_REAL or save_values is not None)
    if real_values and sample:
        raise ValueError("real values need all ranks, not a sample")
    if save_values is not None and not real_values:
        raise ValueError("only real values can be saved: made-up ones say nothing")
    if meta and real_values:
        raise ValueError("real values need the ranks' data, which `meta` does not compute")
    if recorded_values is not None and real_values:
        raise ValueError("values are either real or recorded")
    if save_values is not None and not Path(save_values).resolve().parent.is_dir():
        raise ValueError(f"the folder of {save_values} does not exist")
    recorded = None if recorded_values is None else recording_of(Path(recorded_values))
    import_shared()
    if meta:
        warm_up()
    if not callable(program):
        path = Path(program)
        if not path.is_file():
            raise FileNotFoundError(f"there is no program {path}")
        import_for(path)
        program = str(path)
    folder = Path(tempfile.mkdtemp(prefix="unicomm-rehearsal-"))
    try:
        job = Job(
            program,
            tuple(arguments),
            nnodes,
            ranks // nnodes,
            folder,
            records,
            range(ranks),
            patience,
            real_values,
            save_values is not None,
            recorded,
            bucket_cap_mb,
            hollow_from if meta else None,
            not torch.cuda.is_available() if simulate_cuda is None else simulate_cuda,
        )
        if sample:
            job = replace(job, runs=_chosen(job))
        chosen, jobs = job.runs, jobs or (1 if real_values else len(os.sched_getaffinity(0)))
        other_seeds = with_other_seeds(job.program, chosen)
        ends = run_ranks(job, chosen, jobs, lambda done: progress(done, len(chosen)), other_seeds)
        table = read_table(job)
        table.remarks += read_remarks(job, chosen)
        table.remarks += end_remarks(ends, {rank: job.output(rank) for rank in ends})
        wrapped = [source.rank for source in table.sources if source.wrapped]
        if wrapped:
            text = f"more than {records} operations: raise --records, or rehearse fewer steps"
            table.remarks.append(InputRemark("", f"rank {wrapped[0]} has {text}"))
        if meta and topology is not None:
            text = "--meta computes nothing, so the forecast's times of computing are not those of the model"
            table.remarks.append(InputRemark("", text))
        if save_values is not None:
            save_recording(Path(save_values), [job.values(rank) for rank in chosen], ranks)
        details = read_details(job, chosen)
        rules = rules or Rules()
        report, judged, played = judge(table, rules, details)
        explain(report, other_seeds)
        figures = None
        if topology is not None:
            partners, buffered = played.partners, rules.buffered
            timeline = Timeline(table, details, topology, job.nproc_per_node, partners, buffered)
            figures = forecast(timeline)
            if report.good and not timeline.complete:
                figures = None
                report.remarks.append(
                    InputRemark("", "no forecast: the times of some ranks' steps are not known")
                )
        output = job.output(0).read_text(errors="replace")
        return Rehearsal(report, judged, chosen, output, _unusable(report, judged, ends), figures)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unusable(report: Report, table: Table, ends: dict[int, str]) -> str:
    """Returns why the ranks' operations cannot be judged, "" if they can."""
    for finding in report.findings:
        text = finding.cause.message if finding.cause is not None else ""
        if NotKnownError.CAUSE in text:
            return text
        if _NO_GPU.search(text) and not torch.cuda.is_available():
            return f"the program needs a GPU, and this machine has none. {finding.sentence}"
    if ends:
        rank, why = min(ends.items())
        return f"rank {rank} {why}: nothing is known of what it would have done"
    if not len(table) and report.good:
        return "the program has issued no operation: does it create a communicator or a process group?"
    return ""


def _chosen(job: Job) -> list[int]:
    """Returns the ranks of the sample.

    Rank 0 goes ahead alone and shows the groups; it is run again with the others.
    """
    with tempfile.TemporaryDirectory(dir=job.folder) as folder:
        ahead = replace(job, folder=Path(folder), runs=[0])
        run_ranks(ahead, [0], 1)
        return sample_of(read_table(ahead), job.size)


def sample_of(table: Table, size: int) -> list[int]:
    """Returns ranks that stand for all: of each dimension of rank 0's groups the first, second and last.

    A group of rank 0 that is an arithmetic progression is a dimension of a mesh, unless it is the product of
    others. In a group with messages, such as a pipeline, each rank needs its neighbour: all of it is run.
    """
    kinds = table.kind
    chains = set(table.group[(kinds == OpKind.SEND) | (kinds == OpKind.RECV)].tolist())
    dimensions: dict[int, tuple[int, bool]] = {}  # by stride: size, and whether it is a chain
    others: set[int] = set()
    for index, group in enumerate(table.groups):
        ranks = group.ranks.tolist()
        if 0 not in ranks or len(ranks) < 2:
            continue
        stride, chain = ranks[1] - ranks[0], index in chains
        if ranks == list(range(0, stride * len(ranks), stride)):
            known, linked = dimensions.get(stride, (len(ranks), False))
            shorter = min(known, len(ranks))
            dimensions[stride] = (shorter, linked if shorter < len(ranks) else linked or chain)
        else:
            others |= set(ranks) if chain else _ends(ranks)
    if not dimensions:
        return sorted(others | _ends(range(size)))
    offsets = [
        [stride * at for at in (range(n) if chain else sorted(_ends(range(n))))]
        for stride, (n, chain) in dimensions.items()
    ]
    mesh = {sum(each) for each in itertools.product(*offsets)}
    return sorted(rank for rank in mesh | others if rank < size)


def _ends(ranks: Iterable[int]) -> set[int]:
    found = list(ranks)
    return {found[0], found[min(1, len(found) - 1)], found[-1]}
