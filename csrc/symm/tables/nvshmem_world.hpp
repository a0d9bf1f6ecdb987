// NVSHMEM in this process: the opened library, its one world, and blocking collectives in it.
#pragma once
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include "symm/table_error.hpp"
#include "symm/tables/blocking_thread.hpp"
#include "symm/tables/nvshmem_abi.hpp"

namespace unicomm::symm::nvshmem {

struct Functions {
#define UNICOMM_NVSHMEM_MEMBER(name, ...) std::type_identity_t<__VA_ARGS__>* name = nullptr;
    UNICOMM_NVSHMEM_FUNCTIONS(UNICOMM_NVSHMEM_MEMBER)
#undef UNICOMM_NVSHMEM_MEMBER
};

struct World;

struct Library {
    Functions f;
    int version = 0;
    std::string file;
    BlockingThread& blocking_thread = *new BlockingThread;
    std::mutex mutex;  // guards `world`
    std::weak_ptr<World> world;
    std::atomic<const std::string*> lost{nullptr};  // why the library can no longer be used

    Library(const std::string& path, bool loaded_only);
};
extern Library* library;  // set once, by nvshmem_table
inline const Functions& f() { return library->f; }

// The initialized library. All PEs release it in the end, which finalizes it, unless it was joined.
struct World {
    Id id{};
    std::string name;  // of the communicator that has initialized it
    int rank = 0, size = 0, pid = 0;
    bool limited = false;               // several PEs on one GPU without MPS: see `refuse_limited`
    bool joined = false;                // something else has initialized it, and finalizes it
    uint64_t* announcements = nullptr;  // symmetric: two announcements of this PE, used in turn
    uint64_t collectives = 0;

    // Finalizes the library; collective. A new world waits until this has completed. Does nothing in a forked
    // child, which has no device, or after a failure, when not all PEs would come.
    ~World();
};

// A domain: the world, or a team.
struct Pe {
    std::shared_ptr<World> world;
    int32_t team = kTeamWorld;
    int rank = 0;
    std::vector<int> pes;  // PEs of the world
    bool left = false;
    std::atomic<bool> aborted{false};
};
inline Pe& pe_of(Domain domain) { return *static_cast<Pe*>(domain); }

// Runs a call that blocks until the other PEs arrive. `call` must own what it uses. `aborted` ends the wait
// for it.
int blocking(const char* what, uint64_t deadline_ns, std::function<void()> call, Error* error,
             const std::atomic<bool>* aborted = nullptr);

// Refuses calls for which the library would end the process.
int refuse_limited(const Pe& pe, const char* what, Error* error);

// Adds the functions of nvshmem_streams.cpp.
void put_on_streams(Vtbl& table);

constexpr size_t kWords = 4;  // words of an announcement before a collective
enum What : uint64_t { kAllocate = 1, kFree, kSplit };
using Announcement = std::array<uint64_t, kWords>;  // What, and its arguments

// Allocates the symmetric memory for announcements. Collective.
uint64_t* allocate_announcements();
// Returns the announcements of all PEs, by PE. Collective.
std::vector<Announcement> exchange_announcements(World& world, const Announcement& mine);
// Reports a mismatch of the announcements, if any; the same on all PEs.
int compare(const std::vector<Announcement>& all, Error* error);

}  // namespace unicomm::symm::nvshmem
