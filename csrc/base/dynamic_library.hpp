// Vendor libraries opened at run time. They are never closed: their threads and memory may outlive every
// communicator.
#pragma once
#include <dlfcn.h>

#include <string>

#include "base/error.hpp"

namespace unicomm {

// A function of the list that a vendor's table has, and whether the opened library has it. `since`: a
// version.
struct KnownFunction {
    const char* name;
    int since;
    bool there;
};

// Opens `path` as dlopen does; with `loaded_only` only if this process has already loaded it. Throws
// SystemFailure with the loader's message.
inline void* open_library(const std::string& path, bool loaded_only = false) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | (loaded_only ? RTLD_NOLOAD : 0));
    if (handle != nullptr) return handle;
    const char* why = dlerror();
    throw SystemFailure(why != nullptr ? why : path + " is not loaded");
}

// The file that a function was loaded from; `otherwise` if the loader does not know it.
inline std::string file_of(void* function, const std::string& otherwise) {
    Dl_info info;
    return dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : otherwise;
}

}  // namespace unicomm
