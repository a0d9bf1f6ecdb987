"""Backends: each moves already validated buffers and nothing else.

registry.py   names -> classes (built in, registered, or by the entry points `unicomm.backends`), new_comm
shm.py        ranks of one host over the native core      gloo.py   ProcessGroupGloo over TCP
auto.py       the fastest of these that reaches all ranks
fake.py       one process plays any rank of any size; moves nothing
"""
