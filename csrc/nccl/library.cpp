// Opens NCCL or RCCL and finds its functions.
#include "nccl/library.hpp"

#include "base/dynamic_library.hpp"

namespace unicomm::nccl {
namespace {

// One function is spelled in two ways.
void* find(void* handle, const std::string& name) {
    if (void* found = dlsym(handle, ("nccl" + name).c_str())) return found;
    return name == "AlltoAll" ? dlsym(handle, "ncclAllToAll") : nullptr;
}

}  // namespace

Library::Library(const std::string& path, bool loaded_only) {
    void* handle = open_library(path, loaded_only);
#define UNICOMM_NCCL_FIND(name, since, ...) \
    functions_.name = reinterpret_cast<std::type_identity_t<__VA_ARGS__>*>(find(handle, #name));
    UNICOMM_NCCL_FUNCTIONS(UNICOMM_NCCL_FIND)
#undef UNICOMM_NCCL_FIND
    if (functions_.GetVersion == nullptr || functions_.GetVersion(&version_) != kSuccess) {
        throw SystemFailure(path + " is neither NCCL nor RCCL: it has no ncclGetVersion");
    }
    // Before 2.9 a version had one digit less: 2804 is 2.8.4.
    if (version_ < 10000) version_ = version_code(version_ / 1000, version_ / 100 % 10, version_ % 100);
    file_ = file_of(reinterpret_cast<void*>(functions_.GetVersion), path);
}

std::vector<KnownFunction> Library::known() const {
    return {
#define UNICOMM_NCCL_KNOWN(name, since, ...) {#name, since, functions_.name != nullptr},
        UNICOMM_NCCL_FUNCTIONS(UNICOMM_NCCL_KNOWN)
#undef UNICOMM_NCCL_KNOWN
    };
}

}  // namespace unicomm::nccl
