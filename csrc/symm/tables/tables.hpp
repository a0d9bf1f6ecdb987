// The implementations of the table that have an `init` of their own. (nccl_windows.hpp has none.)
#pragma once
#include <string>

#include "symm/table.hpp"

namespace unicomm::symm {

// Shared memory of this host; the PEs are processes or threads. Has every capability.
const Vtbl& host_table();

// Memory of CUDA or HIP devices, which processes of one host map by IPC handles. Opens the runtime library at
// `path`, whose functions begin with `prefix` ("cuda" or "hip"). A process has one such runtime. Throws
// SystemFailure if the library cannot be opened, lacks functions, or is another one than the first.
const Vtbl& cuda_ipc_table(const std::string& path, const std::string& prefix);

// NVIDIA's NVSHMEM. Opens the library at `path`, with `loaded_only` only if it is already in the process. A
// process has one NVSHMEM. Throws SystemFailure if the library cannot be opened, lacks functions, has an
// unknown version, or is another one than the first.
const Vtbl& nvshmem_table(const std::string& path, bool loaded_only);

struct NvshmemInfo {
    int version;  // 30405 for 3.4.5
    std::string file;
    int status;  // what nvshmemx_init_status returns
};
NvshmemInfo nvshmem_info();

// The table that a shared object exports as `unicomm_symm_table`. Throws SystemFailure. The object stays
// loaded, because its memory may outlive the table.
Vtbl shared_object_table(const std::string& path);

}  // namespace unicomm::symm
