// The table over a window of NCCL or RCCL: one piece of the library's memory on each rank of an existing
// communicator. Other ranks reach it through addresses that the library provides, and signals are the
// library's counters.
//
//   copies      by address, so only to and from ranks whose memory this rank can address
//   signals     one counter for each pair of PEs: a PE adds 1 at a time to one word of another, and waits
//               until one word has at least so many signals of one other PE. The words do not change.
//   meetings    (allocations, teams) by the library's all-gather; the barrier by its smallest all-reduce
//
// There are no atomics. A domain has no `init`: `open_nccl_windows` takes what the backend of the
// communicator has created, and the backend ends the communicator.
#pragma once
#include "nccl/library.hpp"
#include "symm/table.hpp"

namespace unicomm::symm {

// The functions of the device's runtime that the table needs. They return 0, or 600 for "not ready".
struct DeviceCopies {
    int (*copy)(void* to, const void* from, size_t bytes, int kind, Stream) = nullptr;  // cudaMemcpyAsync
    int (*query)(Stream) = nullptr;                                                     // cudaStreamQuery
    int (*last_error)() = nullptr;  // cudaGetLastError, which also clears it
};

struct NcclHeap {
    const nccl::Library* library = nullptr;  // outlives the heap
    nccl::Comm comm = nullptr;
    nccl::Window window = nullptr;
    char* base = nullptr;  // from ncclMemAlloc; freed when the last domain on it is released
    uint64_t bytes = 0;
    int rank = 0, world = 0;
    int signals = -1;  // the index of its signals; -1: none
    DeviceCopies device;
};

// Returns the bytes at the beginning of a heap that the table keeps for itself.
uint64_t nccl_windows_reserve(int world);
// Opens the domain. Local, never fails; finds out which ranks this one can address.
Domain open_nccl_windows(const NcclHeap&);
// Returns the table of domains on such a heap. Functions are missing if the library has no addresses or no
// signals.
Vtbl nccl_windows_table(const NcclHeap&);

}  // namespace unicomm::symm
