// Opens NVSHMEM, runs its blocking calls, and exchanges announcements.
#include "symm/tables/nvshmem_world.hpp"

#include <unistd.h>

#include <algorithm>

#include "base/clock.hpp"
#include "base/dynamic_library.hpp"

namespace unicomm::symm::nvshmem {
namespace {

constexpr uint64_t kLeaving = 2'000'000'000;  // ns that the last PE to leave waits for the others

std::string words_of(const Announcement& said) {
    if (said[0] == kAllocate) return "allocate " + std::to_string(said[1]) + " bytes";
    if (said[0] == kFree) return "free at " + std::to_string(said[1]);
    return said[0] == kSplit ? "team_split" : "?";
}

}  // namespace

Library* library = nullptr;

Library::Library(const std::string& path, bool loaded_only) {
    void* handle = open_library(path, loaded_only);
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
    file = file_of(reinterpret_cast<void*>(this->f.nvshmemx_init_status), path);
}

World::~World() {
    if (pid != int(getpid()) || library->lost != nullptr || announcements == nullptr) return;
    auto leave = [owned = !joined, said = announcements] {
        if (owned) {
            f().nvshmemx_hostlib_finalize();
        } else if (f().nvshmemx_init_status() >= kInitialized) {  // else its owner has finalized it before
            f().nvshmem_free(said);
        }
    };
    library->blocking_thread.run(now_ns() + kLeaving, leave);
}

uint64_t* allocate_announcements() {
    return static_cast<uint64_t*>(f().nvshmem_align(64, 2 * kWords * sizeof(uint64_t)));
}

int blocking(const char* what, uint64_t deadline, std::function<void()> call, Error* error,
             const std::atomic<bool>* aborted) {
    if (auto lost = library->lost.load()) return report(*lost, error);
    if (aborted != nullptr && *aborted) return report(FaultCode::kAborted, "", error);
    if (library->blocking_thread.run(deadline, std::move(call), aborted)) return 0;
    library->lost = new std::string(std::string("NVSHMEM's ") + what +
                                    " did not return in time, and cannot be ended: restart the processes");
    bool told = aborted != nullptr && *aborted;
    return report(told ? FaultCode::kAborted : FaultCode::kTimeout, "", error);
}

int refuse_limited(const Pe& pe, const char* what, Error* error) {
    if (!pe.world->limited) return 0;
    return report(FaultCode::kUnsupported,
                  std::string(what) +
                      " is not possible with several PEs on one GPU without the CUDA MPS server (NVSHMEM's "
                      "limited mode)",
                  error);
}

// Two places, used in turn: a PE that publishes two announcements later has seen that all have read this one.
std::vector<Announcement> exchange_announcements(World& world, const Announcement& mine) {
    uint64_t* here = world.announcements + kWords * (world.collectives++ % 2);
    for (size_t i = 0; i < kWords; ++i) f().nvshmem_uint64_p(here + i, mine[i], world.rank);
    f().nvshmem_barrier_all();
    std::vector<Announcement> all(static_cast<size_t>(world.size));
    for (int pe = 0; pe < world.size; ++pe) {
        for (size_t i = 0; i < kWords; ++i) all[size_t(pe)][i] = f().nvshmem_uint64_g(here + i, pe);
    }
    return all;
}

int compare(const std::vector<Announcement>& all, Error* error) {
    bool same = true;
    for (const Announcement& said : all) same = same && said[0] == all[0][0];
    if (same && all[0][0] != kSplit) same = std::count(all.begin(), all.end(), all[0]) == long(all.size());
    if (same) return 0;
    std::string text;
    std::vector<int> pes;  // all of them: none can say who is right
    for (size_t pe = 0; pe < all.size(); ++pe) {
        text += (pe ? "; rank " : "rank ") + std::to_string(pe) + ": " + words_of(all[pe]);
        pes.push_back(int(pe));
    }
    return report(FaultCode::kMismatch, text, error, pes);
}

}  // namespace unicomm::symm::nvshmem
