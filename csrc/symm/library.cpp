#include "symm/library.hpp"

#include <dlfcn.h>

#include "core/error.hpp"

namespace unicomm::symm {

Vtbl library_table(const std::string& path) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) throw SystemFailure(dlerror());
    auto* entry = reinterpret_cast<TableEntry*>(dlsym(handle, UNICOMM_SYMM_ENTRY));
    if (entry == nullptr) {
        throw SystemFailure(path + " has no table of symmetric memory: no " UNICOMM_SYMM_ENTRY " in it");
    }
    const Vtbl* table = entry(kTableAbi);
    if (table == nullptr) {
        throw SystemFailure(path + " was built for another version of unicomm: build it again");
    }
    Vtbl out = *table;
    out.capabilities = capabilities_of(out);
    return out;
}

}  // namespace unicomm::symm
