// The table over the memory of CUDA devices that processes of one host map by IPC handles.
#pragma once
#include <string>

#include "symm/table.hpp"

namespace unicomm::symm {

// Opens the CUDA runtime at `path`, as dlopen does; the first that was opened counts for the process. Throws
// SystemFailure with the loader's words, or with the functions that it lacks.
const Vtbl& cuda_ipc_table(const std::string& path);

}  // namespace unicomm::symm
