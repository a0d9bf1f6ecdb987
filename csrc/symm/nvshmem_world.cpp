#include "symm/nvshmem_world.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>

namespace unicomm::symm::nvshmem {
namespace {

constexpr uint64_t kLeaving = 2'000'000'000;  // ns that who leaves last waits for the others to leave

uint64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return uint64_t(t.tv_sec) * 1'000'000'000 + uint64_t(t.tv_nsec);
}

std::string words_of(const Said& said) {
    if (said[0] == kAllocate) return "allocate " + std::to_string(said[1]) + " bytes";
    if (said[0] == kFree) return "free at " + std::to_string(said[1]);
    return said[0] == kSplit ? "team_split" : "?";
}

}  // namespace

Library* library = nullptr;

Library::Library(const std::string& path, bool loaded_only) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | (loaded_only ? RTLD_NOLOAD : 0));
    if (handle == nullptr) {
        const char* why = dlerror();
        throw SystemFailure(why != nullptr ? why : path + " is not loaded");
    }
    std::string absent;
#define UNICOMM_NVSHMEM_FIND(name, ...)                                                        \
    this->f.name = reinterpret_cast<std::type_identity_t<__VA_ARGS__>*>(dlsym(handle, #name)); \
    if (this->f.name == nullptr) absent += std::string(absent.empty() ? "" : ", ") + #name;
    UNICOMM_NVSHMEM_FUNCTIONS(UNICOMM_NVSHMEM_FIND)
#undef UNICOMM_NVSHMEM_FIND
    if (!absent.empty()) throw SystemFailure(path + " is no NVSHMEM, or another one: it lacks " + absent);
    int major = 0, minor = 0, patch = 0;
    this->f.nvshmemx_vendor_get_version_info(&major, &minor, &patch);
    version = major * 10000 + minor * 100 + patch;
    if (version < kOldest || version > kNewest) {
        throw SystemFailure(path + " is NVSHMEM " + std::to_string(major) + "." + std::to_string(minor) +
                            "." + std::to_string(patch) +
                            ", whose interface is not known here: 3.4 to 3.x are");
    }
    Dl_info info;
    file =
        dladdr(reinterpret_cast<void*>(this->f.nvshmemx_init_status), &info) != 0 && info.dli_fname != nullptr
            ? info.dli_fname
            : path;
}

int failed(FaultCode code, const std::string& detail, Error* error) {
    error->n_culprits = 0;
    size_t n = std::min(detail.size(), sizeof error->detail - 1);
    std::memcpy(error->detail, detail.data(), n);
    error->detail[n] = 0;
    return int(code);
}
int failed(const std::string& detail, Error* error) { return failed(FaultCode::kInternal, detail, error); }

World::~World() {
    if (pid != int(getpid()) || library->lost != nullptr || said == nullptr) return;
    library->caller.run(now_ns() + kLeaving, [] { f().nvshmemx_hostlib_finalize(); });
}

int blocking(const char* what, uint64_t deadline, std::function<void()> call, Error* error,
             const std::atomic<bool>* aborted) {
    if (auto lost = library->lost.load()) return failed(*lost, error);
    if (aborted != nullptr && *aborted) return failed(FaultCode::kAborted, "", error);
    if (library->caller.run(deadline, std::move(call), aborted)) return 0;
    library->lost = new std::string(std::string("NVSHMEM's ") + what +
                                    " did not return in time, and cannot be ended: restart the processes");
    bool told = aborted != nullptr && *aborted;
    return failed(told ? FaultCode::kAborted : FaultCode::kTimeout, "", error);
}

int refuse_limited(const Pe& pe, const char* what, Error* error) {
    if (!pe.world->limited) return 0;
    return failed(FaultCode::kUnsupported,
                  std::string(what) +
                      " is not possible with several PEs on one GPU without the CUDA MPS server (NVSHMEM's "
                      "limited mode)",
                  error);
}

// By turns of two: who says the next but one has seen that all read these.
std::vector<Said> tell(World& world, const Said& mine) {
    uint64_t* here = world.said + kWords * (world.collectives++ % 2);
    for (size_t i = 0; i < kWords; ++i) f().nvshmem_uint64_p(here + i, mine[i], world.rank);
    f().nvshmem_barrier_all();
    std::vector<Said> all(static_cast<size_t>(world.size));
    for (int pe = 0; pe < world.size; ++pe) {
        for (size_t i = 0; i < kWords; ++i) all[size_t(pe)][i] = f().nvshmem_uint64_g(here + i, pe);
    }
    return all;
}

int compare(const std::vector<Said>& all, Error* error) {
    bool same = true;
    for (const Said& said : all) same = same && said[0] == all[0][0];
    if (same && all[0][0] != kSplit) same = std::count(all.begin(), all.end(), all[0]) == long(all.size());
    if (same) return 0;
    std::string text;
    for (size_t pe = 0; pe < all.size(); ++pe) {
        text += (pe ? "; rank " : "rank ") + std::to_string(pe) + ": " + words_of(all[pe]);
    }
    int code = failed(FaultCode::kMismatch, text, error);
    error->n_culprits = int32_t(std::min(all.size(), std::size(error->culprits)));
    for (int32_t i = 0; i < error->n_culprits; ++i) error->culprits[i] = i;  // nobody says who is right
    return code;
}

}  // namespace unicomm::symm::nvshmem
