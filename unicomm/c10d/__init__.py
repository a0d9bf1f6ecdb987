"""torch.distributed on communicators.

switch.py              runs unchanged programs on unicomm: TORCH_DISTRIBUTED_USE_TORCHCOMMS=1
torchcomms_import.py   `import torchcomms` finds unicomm.torchcomms
plugins.py             backends that third parties have registered with torch
group_creator.py       makes the group of `init_process_group("unicomm")`
choice.py              which backend and device stand behind the names in a program (UNICOMM_BACKEND)
env_rendezvous.py      env:// under mpiexec and srun, when the switch is on
store_deadline.py      env:// and tcp:// end within their timeout, for unicomm's groups
group_names.py         the names of process groups' communicators
subgroups.py           where the members of a group meet; `new_group` when the switch is on
process_group.py       UnicommProcessGroup: a process group over communicators
mixed_group.py         MixedProcessGroup: communicators for some devices, torch's backends for the others
calls/                 how a call of torch's reaches a method of a group
process_group_work.py  the Work objects and futures that a process group returns
batch_isend_irecv.py   the messages of one `batch_isend_irecv` as one group, on devices
device_mesh.py         a DeviceMesh over existing communicators
hooks.py               communication hooks that send gradients in a wire format
functional/            collectives as functions and custom operators (`unicomm.functional`)
compat.py              torch's private parts, by version; imports nothing of unicomm
"""

# torch first: at the end of its import it runs the switch, which needs `compat` whole.
import torch as torch
