"""Examples of the reference: the recorder and the profiler."""

import json

import torch

import unicomm
from unicomm import ReduceOp, flight_recorder, profiler

# %% flight_recorder.dump, flight_recorder.dump_folder
with unicomm.new_comm("shm", "cpu") as own:
    own.barrier()
path = flight_recorder.dump("records.json", format="json")  # all records of this process
assert json.loads(path.read_text())["entries"]
paths = flight_recorder.dump_folder("dumps")  # one file for each rank, for torchfrtrace, too
assert paths[0].name == "rank_0"

# %% profiler.events, profiler.CommEvent
# %% profiler.CommEvent.name, profiler.CommEvent.rank, profiler.CommEvent.finished
with unicomm.new_comm("shm", "cpu", name="main") as own:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        own.all_reduce(torch.ones(4), ReduceOp.SUM)
(event,) = profiler.events(prof)
assert (event.op, event.seq_num, event.bytes) == ("all_reduce", 1, 16)
assert (event.name, event.rank, event.finished) == ("unicomm::all_reduce", 0, True)

# %% profiler.read_events, profiler.merge, profiler.report
with unicomm.new_comm("shm", "cpu", name="main") as own:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        own.all_reduce(torch.ones(4), ReduceOp.SUM)
prof.export_chrome_trace("rank0.json")  # one trace for each rank
assert profiler.read_events("rank0.json")[0].op == "all_reduce"
assert profiler.merge(["rank0.json"], "merged.json").operations == 1
assert profiler.report(["rank0.json"]).source == "1 trace"

# %% profiler.TraceError
try:
    profiler.report(["no-such-file.json"])
except profiler.TraceError as error:
    assert "does not exist" in str(error)

# %% profiler.graph_annotations, profiler.annotate
with unicomm.new_comm("shm", "cpu") as own:
    annotations = profiler.graph_annotations(own)  # of CUDA graphs; on a CPU nothing is captured
annotations.save("annotations.json")
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
    torch.ones(1)
prof.export_chrome_trace("trace.json")
assert profiler.annotate("trace.json", "annotations.json", "annotated.json") == 0
