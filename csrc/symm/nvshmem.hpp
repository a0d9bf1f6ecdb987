// The table over NVIDIA's NVSHMEM.
#pragma once
#include <string>

#include "symm/table.hpp"

namespace unicomm::symm {

// Opens the library at `path`, as dlopen does, or with `loaded_only` takes it where it is in the process
// already; a process has one. Throws SystemFailure with the loader's words, the functions that it lacks, its
// version, where that is none that is known, or the file of the first one, where this is another.
const Vtbl& nvshmem_table(const std::string& path, bool loaded_only);

// Of the opened library: its version, 30405 for 3.4.5, its file, and its own words for how far it is
// initialised (nvshmemx_init_status_t).
struct NvshmemInfo {
    int version;
    std::string file;
    int status;
};
NvshmemInfo nvshmem_info();

}  // namespace unicomm::symm
