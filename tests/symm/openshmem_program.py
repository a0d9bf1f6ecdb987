"""One PE of an OpenSHMEM job, for test_openshmem.py: openshmem_program.py SEED ELEMENTS

Calls Open MPI's liboshmem by its C functions, as OpenSHMEM 1.4 has them, on numbers that the seed gives.
Prints its results as a line of JSON. Needs numpy only.
"""

import ctypes
import json
import os
import sys

import numpy as np

SEED, COUNT = int(sys.argv[1]), int(sys.argv[2])
shmem = ctypes.CDLL("liboshmem.so.40", ctypes.RTLD_GLOBAL)
shmem.shmem_malloc.restype = ctypes.c_void_p
shmem.shmem_malloc.argtypes = [ctypes.c_size_t]
for name in ("shmem_putmem", "shmem_getmem"):
    getattr(shmem, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
P, N, L, Z = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_size_t
shmem.shmem_alltoall64.argtypes = [P, P, Z, N, N, N, P]
shmem.shmem_broadcast64.argtypes = [P, P, Z, N, N, N, N, P]
for name in ("shmem_long_sum_to_all", "shmem_long_max_to_all", "shmem_long_min_to_all"):
    getattr(shmem, name).argtypes = [P, P, N, N, N, N, P, P]
shmem.shmem_long_atomic_fetch_add.restype = L
shmem.shmem_long_atomic_fetch_add.argtypes = [P, L, N]
shmem.shmem_long_atomic_compare_swap.restype = L
shmem.shmem_long_atomic_compare_swap.argtypes = [P, L, L, N]

shmem.shmem_init()
me, n = shmem.shmem_my_pe(), shmem.shmem_n_pes()


def room(words, fill=0):
    """A symmetric array of int64."""
    at = shmem.shmem_malloc(8 * words)
    array = np.ctypeslib.as_array((ctypes.c_int64 * words).from_address(at))
    array[:] = fill
    return array


def at(array):
    return array.ctypes.data


def synced():
    """What an old collective needs to have for itself."""
    made = room(1024, -1)
    shmem.shmem_barrier_all()
    return at(made)


data = np.random.default_rng(SEED).integers(-1000, 1000, (n, n * COUNT))
splits_of = np.random.default_rng(SEED + 1).integers(0, COUNT + 1, (n, n))
source, target = room(n * COUNT), room(n * COUNT, -7)
source[:] = data[me]
results = {}

shmem.shmem_alltoall64(at(target), at(source), COUNT, 0, 0, n, synced())
shmem.shmem_barrier_all()
results["all_to_all"] = target.tolist()

for op in ("sum", "max", "min"):
    reduce = getattr(shmem, f"shmem_long_{op}_to_all")
    reduce(at(target), at(source), n * COUNT, 0, 0, n, at(room(n * COUNT + 64)), synced())
    shmem.shmem_barrier_all()
    results[op] = target.tolist()

target[:] = source
shmem.shmem_broadcast64(at(target), at(source), n * COUNT, n - 1, 0, 0, n, synced())
shmem.shmem_barrier_all()
results["broadcast"] = target.tolist()

# An exchange of parts of unequal length: everybody reads the lengths, and then its parts, from the others.
splits = room(n)
splits[:] = splits_of[me]
shmem.shmem_barrier_all()
target[:] = -7
theirs, place = np.zeros(n, np.int64), 0
came = []
for pe in range(n):
    shmem.shmem_getmem(at(theirs), at(splits), 8 * n, pe)
    count, first = int(theirs[me]), int(theirs[:me].sum())
    if count:
        shmem.shmem_getmem(at(target) + 8 * place, at(source) + 8 * first, 8 * count, pe)
    came.append(count)
    place += count
shmem.shmem_barrier_all()
results["came"], results["all_to_all_v"] = came, target.tolist()

# To the next one.
target[:] = -7
shmem.shmem_barrier_all()
shmem.shmem_putmem(at(target) + 8, at(source), 8 * (COUNT - 1), (me + 1) % n)
shmem.shmem_barrier_all()
results["put"] = target.tolist()

word = room(2)
shmem.shmem_barrier_all()
for _ in range(5):
    shmem.shmem_long_atomic_fetch_add(at(word), me + 1, 0)
before = shmem.shmem_long_atomic_compare_swap(at(word) + 8, 0, 9, me)
again = shmem.shmem_long_atomic_compare_swap(at(word) + 8, 0, 11, me)
shmem.shmem_barrier_all()
results["words"] = [*word.tolist(), before, again] if me == 0 else [0, int(word[1]), before, again]

print(json.dumps({"pe": me, "results": results}), flush=True)
shmem.shmem_barrier_all()
os._exit(0)  # Open MPI 4.1's shmem_finalize may crash
