// The table over the memory of devices, CUDA or HIP, that processes of one host map by IPC handles.
#pragma once
#include <string>

#include "symm/table.hpp"

namespace unicomm::symm {

// Opens the runtime at `path`, as dlopen does, whose functions begin with `prefix` ("cuda" or "hip"); the
// process has one. Throws SystemFailure with the loader's words, the functions that it lacks, or the file of
// the first one, where this is another.
const Vtbl& cuda_ipc_table(const std::string& path, const std::string& prefix);

}  // namespace unicomm::symm
