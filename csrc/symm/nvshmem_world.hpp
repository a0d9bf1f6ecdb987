// NVSHMEM in this process: the opened library, its one world, and collectives of the host in it.
#pragma once
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include "core/error.hpp"
#include "symm/caller.hpp"
#include "symm/nvshmem_abi.hpp"
#include "symm/table.hpp"

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
    Caller& caller = *new Caller;
    std::mutex mutex;  // of `world`
    std::weak_ptr<World> world;
    std::atomic<const std::string*> lost{nullptr};  // why the library is of no more use

    Library(const std::string& path, bool loaded_only);
};
extern Library* library;  // set once, by nvshmem_table
inline const Functions& f() { return library->f; }

int failed(FaultCode code, const std::string& detail, Error* error);
int failed(const std::string& detail, Error* error);  // kInternal

// The library, initialised. All PEs release it in the end, which finalises it.
struct World {
    Id id{};
    std::string name;  // of the communicator that has initialised it
    int rank = 0, size = 0, pid = 0;
    bool limited = false;      // several PEs on one GPU without MPS: see `refuse_limited`
    uint64_t* said = nullptr;  // symmetric: what this PE says, for two collectives in turn
    uint64_t collectives = 0;

    // Collective: finalises it. Elsewhere in the process it may still be going on when the next one is made,
    // which then waits for it. A forked child has no device, and after a failure nobody comes.
    ~World();
};

// A PE's end of the world, or of a team.
struct Pe {
    std::shared_ptr<World> world;
    int32_t team = kTeamWorld;
    int rank = 0;
    std::vector<int> pes;  // of the world
    bool left = false;
    std::atomic<bool> aborted{false};
};
inline Pe& pe_of(Domain domain) { return *static_cast<Pe*>(domain); }

// Runs what blocks until the other PEs come. `call` owns what it uses. `aborted`: ends the wait for it.
int blocking(const char* what, uint64_t deadline_ns, std::function<void()> call, Error* error,
             const std::atomic<bool>* aborted = nullptr);

// What the library would end the process for.
int refuse_limited(const Pe& pe, const char* what, Error* error);

// nvshmem_streams.cpp: what the table does on streams.
void put_on_streams(Vtbl& table);

constexpr size_t kWords = 4;  // what a PE says before a collective
enum What : uint64_t { kAllocate = 1, kFree, kSplit };
using Said = std::array<uint64_t, kWords>;  // What, and its arguments

// All PEs' words, by PE. Collective.
std::vector<Said> tell(World& world, const Said& mine);
// The mismatch of what all say, if any; the same on all PEs.
int compare(const std::vector<Said>& all, Error* error);

}  // namespace unicomm::symm::nvshmem
