"""torch.distributed on communicators.

switch.py              runs unchanged programs on unicomm: TORCH_DISTRIBUTED_USE_TORCHCOMMS=1
torchcomms_import.py   `import torchcomms` finds unicomm.torchcomms
plugins.py             backends that third parties have registered with torch
group_creator.py       makes the group of `init_process_group("unicomm")`
choice.py              which backend and device stand behind the names in a program (UNICOMM_BACKEND)
env_rendezvous.py      env:// under mpiexec and srun, when the switch is on
subgroups.py           where the members of a group meet; `new_group` when the switch is on
process_group.py       UnicommProcessGroup: a process group over communicators
mixed_group.py         MixedProcessGroup: communicators for some devices, torch's backends for the others
torch_method.py        what the methods of a process group have in common
overloads.py           the forms in which torch's groups take arguments
dispatcher.py          operations as torch's c10d operators, for dispatch modes and tensor subclasses
titles.py              events of torch.profiler under the names of torch's own groups
layouts.py             tensors that fill their memory in another order, such as channels_last
sparse.py              the sum of sparse tensors
process_group_work.py  the Work objects and futures that a process group returns
batch_isend_irecv.py   the messages of one `batch_isend_irecv` as one group, on devices
device_mesh.py         a DeviceMesh over existing communicators
functional.py          collectives as functions and custom operators (`unicomm.functional`)
functional_table.py    the table of custom operators
functional_kernels.py  kernel, shape function and gradient of each custom operator
functional_declare.py  declares the table's operators to torch
functional_async.py    asynchronous forms, which Inductor reorders
functional_messages.py send, receive and barrier in graphs
functional_methods.py  what torch.compile traces for a communicator's methods
compat.py              torch's private parts, by version; imports nothing of unicomm
"""

# torch first: at the end of its import it runs the switch, which needs `compat` whole.
import torch as torch
