// NVSHMEM is initialised once a process and has one world. The first `init` does it; an `init` by the same
// id joins it, as the communicator's symmetric memory does beside the communicator; any other is refused.
//
// What the library does on streams (nvshmem_streams.cpp) returns at once and cannot be ended: deadlines of
// such calls are the business of who watches the stream. Calls that block on the host run in a thread of
// their own (caller.hpp), and whoever waits for them gives up at the deadline; the library is then of no more
// use to the process.
//
// Before it allocates, frees or splits, all PEs tell each other what they are about to do, by single words
// and a barrier, so that a mismatch is an error on all of them and changes nothing.
#include "symm/nvshmem.hpp"

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "symm/nvshmem_world.hpp"

namespace unicomm::symm {
namespace {

using namespace nvshmem;

constexpr uint64_t kMiB = uint64_t{1} << 20;

// --- life --------------------------------------------------------------------------------------------------

// The version's place in an id, which all PEs know, carries the heap's size in MiB; 0: the library's default.
uint32_t& heap_in(UniqueId& id) { return *reinterpret_cast<uint32_t*>(id.bytes); }

void ask_for_heap(uint32_t mebibytes) {
    if (mebibytes != 0) setenv("NVSHMEM_SYMMETRIC_SIZE", std::to_string(mebibytes * kMiB).c_str(), 1);
}

bool same_id(const UniqueId& id, const World& world) {
    return std::memcmp(id.bytes + sizeof id.bytes - sizeof world.id.internal, world.id.internal,
                       sizeof world.id.internal) == 0;
}

std::string in_use(const World& world) {
    return "NVSHMEM has one world a process, which communicator '" + world.name + "' of " +
           std::to_string(world.size) + " ranks has: split that one, or finalize it on all ranks first";
}

int unique_id(int world, uint64_t heap_bytes, UniqueId* out, Error* error) {
    std::lock_guard lock(library->mutex);
    if (auto lost = library->lost.load()) return failed(*lost, error);
    Id id{versioned(1, sizeof(Id)), {}};
    if (auto living = library->world.lock()) {
        if (living->size != world) return failed(in_use(*living), error);
        id = living->id;
        heap_bytes = 0;  // it has one
    } else {
        uint64_t mebibytes = (heap_bytes + kMiB - 1) / kMiB;
        if (mebibytes > UINT32_MAX) return failed("so large a heap has no machine", error);
        ask_for_heap(uint32_t(mebibytes));  // this process reads its variables now
        if (int result = f().nvshmemx_get_uniqueid(&id)) {
            return failed("nvshmemx_get_uniqueid failed with " + std::to_string(result), error);
        }
    }
    if (id.version != versioned(1, sizeof(Id))) return failed("its ids have an unknown version", error);
    static_assert(sizeof(Id) == sizeof(UniqueId));
    std::memcpy(out, &id, sizeof id);
    heap_in(*out) = uint32_t((heap_bytes + kMiB - 1) / kMiB);
    return 0;
}

int discard_id(const UniqueId*, Error*) { return 0; }  // NVSHMEM keeps nothing that could be given back

Domain end_of(const std::shared_ptr<World>& world) {
    auto pe = std::make_unique<Pe>();
    pe->world = world;
    pe->rank = world->rank;
    for (int i = 0; i < world->size; ++i) pe->pes.push_back(i);
    return pe.release();
}

struct Started {
    InitAttr attr{};
    Id id{};
    int result = 0, status = 0, rank = -1, size = 0;
    uint64_t* said = nullptr;
};

int init(const UniqueId* uid, int rank, int size, const char* name, uint64_t deadline, Domain* out,
         Error* error) {
    UniqueId id = *uid;
    {
        std::lock_guard lock(library->mutex);
        if (auto living = library->world.lock()) {
            if (!same_id(id, *living) || living->size != size || living->rank != rank) {
                return failed(in_use(*living), error);
            }
            *out = end_of(living);
            return 0;
        }
    }
    // One that is being finalised in that thread comes first.
    if (int code = blocking("finalize", deadline, [] {}, error)) return code;
    if (f().nvshmemx_init_status() >= kInitialized) {
        return failed("NVSHMEM was initialised by something else in this process, and has one world", error);
    }
    ask_for_heap(heap_in(id));
    auto world = std::make_shared<World>();
    auto started = std::make_shared<Started>();
    std::memcpy(&started->id, &id, sizeof id);
    started->id.version = versioned(1, sizeof(Id));
    world->id = started->id;
    auto call = [started, rank, size] {
        InitAttr& attr = started->attr;
        attr.version = versioned(1, sizeof(InitAttr));
        attr.args.version = versioned(1, sizeof(InitArgs));
        attr.args.id.version = versioned(1, sizeof(IdArgs));
        started->result = f().nvshmemx_set_attr_uniqueid_args(rank, size, &started->id, &attr);
        if (started->result == 0) {
            started->result = f().nvshmemx_hostlib_init_attr(kInitWithUniqueId, &attr);
        }
        started->status = f().nvshmemx_init_status();
        if (started->result != 0 || started->status < kInitialized) return;
        started->rank = f().nvshmem_my_pe(), started->size = f().nvshmem_n_pes();
        size_t bytes = 2 * kWords * sizeof(uint64_t);
        started->said = static_cast<uint64_t*>(f().nvshmem_align(64, bytes));
    };
    if (int code = blocking("init", deadline, call, error)) return code;
    if (started->result != 0) {
        return failed("nvshmemx_hostlib_init_attr failed with " + std::to_string(started->result) +
                          ": NVSHMEM has written why; NVSHMEM_DEBUG=INFO has it write more",
                      error);
    }
    // Without a device it only connects, and says nothing.
    if (started->status < kInitialized) {
        return failed("NVSHMEM has connected the ranks but found no GPU for this one", error);
    }
    if (started->rank != rank || started->size != size || started->said == nullptr) {
        return failed("NVSHMEM made this PE " + std::to_string(started->rank) + " of " +
                          std::to_string(started->size) + ", or has no memory at all",
                      error);
    }
    world->name = name, world->rank = rank, world->size = size, world->pid = int(getpid());
    world->limited = started->status == kLimitedMpg;
    world->said = started->said;
    std::lock_guard lock(library->mutex);
    library->world = world;
    *out = end_of(world);
    return 0;
}

int leave(Domain domain, Error*) {
    pe_of(domain).left = true;
    return 0;
}

// What blocks on the host for this domain. The library is not told: it would end the process, or wait.
int abort_domain(Domain domain, Error*) {
    pe_of(domain).aborted = true;
    library->caller.wake();
    return 0;
}

int release(Domain domain, Error*) {
    std::unique_ptr<Pe> pe(&pe_of(domain));
    if (pe->team != kTeamWorld && pe->world->pid == int(getpid()) && library->lost == nullptr) {
        library->caller.run(0, [team = pe->team] { f().nvshmem_team_destroy(team); });
    }
    return 0;
}

// --- collectives on the host -------------------------------------------------------------------------------

struct Collective {
    std::shared_ptr<World> world;
    Error error{};
    int code = 0;
    void* address = nullptr;
    int32_t team = kTeamInvalid;
    std::vector<int> pes;
    int rank = -1;
};

// Says `mine`, compares, and runs `act` with what all said where they agree.
template <class F>
int together(Pe& pe, const char* what, const Said& mine, uint64_t deadline, std::shared_ptr<Collective>& out,
             Error* error, F act) {
    if (pe.team != kTeamWorld) return failed("all PEs do that together, not those of a team", error);
    if (pe.left) return failed("this rank has left", error);
    auto job = out = std::make_shared<Collective>();
    job->world = pe.world;
    auto call = [job, mine, act] {
        std::vector<Said> all = tell(*job->world, mine);
        job->code = compare(all, &job->error);
        if (job->code == 0) act(*job, all);
    };
    if (int code = blocking(what, deadline, call, error, &pe.aborted)) return code;
    if (job->code != 0) *error = job->error;
    return job->code;
}

int allocate(Domain domain, uint64_t bytes, uint64_t align, uint64_t deadline, void** out, Error* error) {
    std::shared_ptr<Collective> job;
    uint64_t room = std::max<uint64_t>(bytes, 1), edge = std::max<uint64_t>(align, 64);
    int code = together(
        pe_of(domain), "allocation", Said{kAllocate, bytes, align}, deadline, job, error,
        [room, edge](Collective& c, const std::vector<Said>&) { c.address = f().nvshmem_align(edge, room); });
    if (code != 0) return code;
    if (job->address == nullptr) {
        return failed("no room for " + std::to_string(bytes) +
                          " bytes in the symmetric heap (NVSHMEM_SYMMETRIC_SIZE is its size)",
                      error);
    }
    *out = job->address;
    return 0;
}

int free_memory(Domain domain, void* address, uint64_t deadline, Error* error) {
    Pe& pe = pe_of(domain);
    auto at = uint64_t(static_cast<char*>(address) - reinterpret_cast<char*>(pe.world->said));
    std::shared_ptr<Collective> job;
    return together(pe, "free", Said{kFree, at}, deadline, job, error,
                    [address](Collective&, const std::vector<Said>&) { f().nvshmem_free(address); });
}

// The teams that the PEs name, each once, if every member names the one that it is in.
struct Team {
    int start, stride, size;
    auto operator<=>(const Team&) const = default;
    int at(int i) const { return start + i * stride; }
};
int teams_of(const std::vector<Said>& all, std::vector<Team>& teams, Error* error) {
    int world = int(all.size());
    auto named = [&](int pe) {
        const Said& said = all[size_t(pe)];
        return Team{int(int64_t(said[1])), int(int64_t(said[2])), int(int64_t(said[3]))};
    };
    for (int pe = 0; pe < world; ++pe) {
        Team team = named(pe);
        if (team.size == 0) continue;
        bool good = team.size > 0 && team.size <= world && (team.size == 1 || team.stride > 0);
        for (int i = 0; good && i < team.size; ++i) {
            good = team.at(i) >= 0 && team.at(i) < world && named(team.at(i)) == team;
        }
        if (!good) {
            int code = failed(FaultCode::kMismatch,
                              "the team of rank " + std::to_string(pe) +
                                  " is none (ranks i, i + k, i + 2 k ...), or its members name others",
                              error);
            error->n_culprits = 1, error->culprits[0] = pe;
            return code;
        }
        if (std::find(teams.begin(), teams.end(), team) == teams.end()) teams.push_back(team);
    }
    return 0;
}

void split(Collective& c, const std::vector<Said>& all) {
    std::vector<Team> teams;
    if ((c.code = teams_of(all, teams, &c.error)) != 0) return;
    for (const Team& team : teams) {  // each by all PEs, in the same order
        int32_t made = kTeamInvalid;
        int stride = std::max(team.stride, 1);
        int result =
            f().nvshmem_team_split_strided(kTeamWorld, team.start, stride, team.size, nullptr, 0, &made);
        int place = -1;
        for (int i = 0; i < team.size; ++i) place = team.at(i) == c.world->rank ? i : place;
        if (place < 0) continue;
        if (result != 0 || made == kTeamInvalid) {
            c.code = failed("nvshmem_team_split_strided failed (NVSHMEM_MAX_TEAMS is how many there can be)",
                            &c.error);
            continue;
        }
        c.team = made, c.rank = place;
        for (int i = 0; i < team.size; ++i) c.pes.push_back(team.at(i));
    }
}

int team_split(Domain domain, int start, int stride, int size, uint64_t deadline, Domain* out, Error* error) {
    *out = nullptr;
    Pe& pe = pe_of(domain);
    if (int code = refuse_limited(pe, "a team", error)) return code;
    std::shared_ptr<Collective> job;
    Said mine{kSplit, uint64_t(int64_t(start)), uint64_t(int64_t(stride)), uint64_t(int64_t(size))};
    if (int code = together(pe, "team_split", mine, deadline, job, error, split)) return code;
    if (job->team == kTeamInvalid) return 0;
    auto made = std::make_unique<Pe>();
    made->world = pe.world, made->team = job->team, made->rank = job->rank, made->pes = job->pes;
    *out = made.release();
    return 0;
}

}  // namespace

const Vtbl& nvshmem_table(const std::string& path, bool loaded_only) {
    // Opened also where there is one: who asks for a library that is none, or another one, must hear so.
    auto asked = std::make_unique<Library>(path, loaded_only);
    if (library == nullptr) library = asked.release();  // its threads may outlive every communicator
    if (asked != nullptr && asked->f.nvshmemx_init_status != f().nvshmemx_init_status)
        throw SystemFailure(path + " would be this process's second NVSHMEM, after " + library->file);
    static const Vtbl table = [] {
        Vtbl t{};
        t.name = "NVSHMEM";
        t.unique_id = unique_id, t.discard_id = discard_id, t.init = init, t.leave = leave;
        t.release = release, t.abort = abort_domain, t.allocate = allocate, t.free = free_memory;
        t.team_split = team_split;
        put_on_streams(t);
        t.capabilities = capabilities_of(t);
        return t;
    }();
    return table;
}

NvshmemInfo nvshmem_info() {
    if (library == nullptr) throw SystemFailure("NVSHMEM is not open");
    return {library->version, library->file, f().nvshmemx_init_status()};
}

}  // namespace unicomm::symm
