// The table of a shared object that was built elsewhere.
#include "base/dynamic_library.hpp"
#include "symm/tables/tables.hpp"

namespace unicomm::symm {

Vtbl shared_object_table(const std::string& path) {
    void* handle = open_library(path);
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
