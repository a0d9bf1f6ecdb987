"""How a call of torch's reaches the method of a process group.

torch_method.py  what all methods have in common, in the order of the call
short.py         messages and barriers that need one native call only
table.py         the methods: operator, options, arguments, names
overloads.py     the forms in which torch's groups take arguments
dispatcher.py    calls as torch's c10d operators, for dispatch modes and tensor subclasses
titles.py        events of torch.profiler under the names of torch's own groups
layouts.py       tensors that fill their memory in another order, such as channels_last
sparse.py        the sum of sparse tensors
"""
