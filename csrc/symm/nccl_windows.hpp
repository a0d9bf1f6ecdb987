// The table over a window of NCCL or RCCL: one piece of the library's memory on each rank of a communicator
// that exists already. Others reach it by the address that the library gives for it where there is one, and
// signals are the library's counters.
//
//   copies      by address, so only to and from ranks whose memory can be addressed here
//   signals     one counter for each pair of PEs: a PE adds one at a time to one word of another's, and waits
//               until one word has at least so many of one other's. The words themselves stay as they are.
//   meetings    (allocations, teams) by the library's all-gather; the barrier by its smallest all-reduce
//
// There are no atomics. A domain has no `init`: `open_nccl_windows` takes what the communicator's backend has
// made, and the backend ends the communicator.
#pragma once
#include "nccl/library.hpp"
#include "symm/table.hpp"

namespace unicomm::symm {

// What the device's runtime is needed for. Results are 0, or 600 for "not yet".
struct DeviceCopies {
    int (*copy)(void* to, const void* from, size_t bytes, int kind, Stream) = nullptr;  // cudaMemcpyAsync
    int (*query)(Stream) = nullptr;                                                     // cudaStreamQuery
    int (*last_error)() = nullptr;  // cudaGetLastError, which forgets it
};

struct NcclHeap {
    const nccl::Library* library = nullptr;  // stays
    nccl::Comm comm = nullptr;
    nccl::Window window = nullptr;
    char* base = nullptr;  // of ncclMemAlloc; given back when the last domain on it is released
    uint64_t bytes = 0;
    int rank = 0, world = 0;
    int signals = -1;  // the index of its signals; -1: it has none
    DeviceCopies device;
};

// Bytes at the beginning of a heap that the table keeps for itself.
uint64_t nccl_windows_reserve(int world);
// Local. Never fails; what cannot be addressed is known then.
Domain open_nccl_windows(const NcclHeap&);
// That of domains on such a heap: less than all of it where the library has no addresses or no signals.
Vtbl nccl_windows_table(const NcclHeap&);

}  // namespace unicomm::symm
