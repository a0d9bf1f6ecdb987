// The table over NVSHMEM: life, allocations and teams.
//
// NVSHMEM is initialized once per process and has one world. The first `init` initializes it; an `init` by
// the same id joins it, as the communicator's symmetric memory does beside the communicator; any other is
// refused. If something else in the process, such as nvshmem4py or torch, has initialized it on all ranks,
// the first `init` joins that world: its id says so, and its ranks must be the PEs of the same numbers. Such
// a world is never finalized here.
//
// What the library does on streams (nvshmem_streams.cpp) returns at once and cannot be ended: whoever watches
// the stream keeps the deadline. Calls that block the host run in a thread of their own
// (blocking_thread.hpp), and their caller gives up at the deadline; the process can then no longer use the
// library.
//
// Before they allocate, free or split, all PEs exchange what they are about to do, by single words and a
// barrier, so that a mismatch is an error on all of them and changes nothing.
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "symm/tables/nvshmem_world.hpp"
#include "symm/tables/tables.hpp"

namespace unicomm::symm {
namespace {

using namespace nvshmem;

constexpr uint64_t kMiB = uint64_t{1} << 20;

// --- life --------------------------------------------------------------------------------------------------

// All PEs know the version of an id. Its place carries the size of the heap in MiB; 0: the library's default.
uint32_t& heap_in(UniqueId& id) { return *reinterpret_cast<uint32_t*>(id.bytes); }

void ask_for_heap(uint32_t mebibytes) {
    if (mebibytes != 0) setenv("NVSHMEM_SYMMETRIC_SIZE", std::to_string(mebibytes * kMiB).c_str(), 1);
}

bool same_id(const UniqueId& id, const World& world) {
    return std::memcmp(id.bytes + sizeof id.bytes - sizeof world.id.internal, world.id.internal,
                       sizeof world.id.internal) == 0;
}

// The id of a world that something else in the process has initialized.
constexpr char kJoins[] = "unicomm joins a world of NVSHMEM";

bool joins(const Id& id) { return std::memcmp(id.internal, kJoins, sizeof kJoins) == 0; }
bool initialized() { return f().nvshmemx_init_status() >= kInitialized; }

std::string pes_there() {
    return "NVSHMEM, which something else in this process has initialised, makes it PE " +
           std::to_string(f().nvshmem_my_pe()) + " of " + std::to_string(f().nvshmem_n_pes());
}

std::string in_use(const World& world) {
    return "NVSHMEM has one world a process, which communicator '" + world.name + "' of " +
           std::to_string(world.size) + " ranks has: split that one, or finalize it on all ranks first";
}

int unique_id(int world, uint64_t heap_bytes, UniqueId* out, Error* error) {
    std::lock_guard lock(library->mutex);
    if (auto lost = library->lost.load()) return report(*lost, error);
    Id id{versioned(1, sizeof(Id)), {}};
    if (auto living = library->world.lock()) {
        if (living->size != world) return report(in_use(*living), error);
        id = living->id;
        heap_bytes = 0;  // the heap exists already
    } else if (initialized()) {
        std::memcpy(id.internal, kJoins, sizeof kJoins);
        heap_bytes = 0;
    } else {
        uint64_t mebibytes = (heap_bytes + kMiB - 1) / kMiB;
        if (mebibytes > UINT32_MAX) return report("so large a heap has no machine", error);
        ask_for_heap(uint32_t(mebibytes));  // this process reads its variables now
        if (int result = f().nvshmemx_get_uniqueid(&id)) {
            return report("nvshmemx_get_uniqueid failed with " + std::to_string(result), error);
        }
    }
    if (id.version != versioned(1, sizeof(Id))) return report("its ids have an unknown version", error);
    static_assert(sizeof(Id) == sizeof(UniqueId));
    std::memcpy(out, &id, sizeof id);
    heap_in(*out) = uint32_t((heap_bytes + kMiB - 1) / kMiB);
    return 0;
}

int discard_id(const UniqueId*, Error*) { return 0; }  // NVSHMEM keeps nothing that could be freed

Domain end_of(const std::shared_ptr<World>& world) {
    auto pe = std::make_unique<Pe>();
    pe->world = world;
    pe->rank = world->rank;
    for (int i = 0; i < world->size; ++i) pe->pes.push_back(i);
    return pe.release();
}

int begin(const std::shared_ptr<World>& world, int rank, int size, const char* name, Domain* out) {
    world->name = name, world->rank = rank, world->size = size, world->pid = int(getpid());
    world->limited = f().nvshmemx_init_status() == kLimitedMpg;
    std::lock_guard lock(library->mutex);
    library->world = world;
    *out = end_of(world);
    return 0;
}

// Joins the world that is there. Local: what needs all PEs is made in the first collective.
int join(const std::shared_ptr<World>& world, int rank, int size, const char* name, Domain* out,
         Error* error) {
    if (!initialized()) {
        return report(
            "rank 0 has a world of NVSHMEM that something else has initialised, and this rank has none",
            error);
    }
    if (!joins(world->id)) return report(pes_there() + "; on rank 0 it is not initialised", error);
    if (f().nvshmem_my_pe() != rank || f().nvshmem_n_pes() != size) {
        return report(pes_there() + ", and the communicator has it as rank " + std::to_string(rank) + " of " +
                          std::to_string(size),
                      error);
    }
    world->joined = true;
    return begin(world, rank, size, name, out);
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
                return report(in_use(*living), error);
            }
            *out = end_of(living);
            return 0;
        }
    }
    // A world that is being finalized in that thread comes first.
    if (int code = blocking("finalize", deadline, [] {}, error)) return code;
    auto world = std::make_shared<World>();
    auto started = std::make_shared<Started>();
    std::memcpy(&started->id, &id, sizeof id);
    started->id.version = versioned(1, sizeof(Id));
    world->id = started->id;
    if (joins(started->id) || initialized()) return join(world, rank, size, name, out, error);
    ask_for_heap(heap_in(id));
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
        started->said = allocate_announcements();
    };
    if (int code = blocking("init", deadline, call, error)) return code;
    if (started->result != 0) {
        return report("nvshmemx_hostlib_init_attr failed with " + std::to_string(started->result) +
                          ": NVSHMEM has written why; NVSHMEM_DEBUG=INFO has it write more",
                      error);
    }
    // Without a device it only connects, and reports nothing.
    if (started->status < kInitialized) {
        return report("NVSHMEM has connected the ranks but found no GPU for this one", error);
    }
    if (started->rank != rank || started->size != size || started->said == nullptr) {
        return report("NVSHMEM made this PE " + std::to_string(started->rank) + " of " +
                          std::to_string(started->size) + ", or has no memory at all",
                      error);
    }
    world->announcements = started->said;
    return begin(world, rank, size, name, out);
}

int leave(Domain domain, Error*) {
    pe_of(domain).left = true;
    return 0;
}

// Ends calls of this domain that block the host. The library is not told: it would end the process, or wait.
int abort_domain(Domain domain, int, const Error*, Error*) {
    pe_of(domain).aborted = true;
    library->blocking_thread.wake();
    return 0;
}

int release(Domain domain, Error*) {
    std::unique_ptr<Pe> pe(&pe_of(domain));
    if (pe->team != kTeamWorld && pe->world->pid == int(getpid()) && library->lost == nullptr) {
        library->blocking_thread.run(0, [team = pe->team] { f().nvshmem_team_destroy(team); });
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

// Exchanges `mine` with all PEs and compares; if all agree, runs `act` with the announcements.
template <class F>
int run_together(Pe& pe, const char* what, const Announcement& mine, uint64_t deadline,
                 std::shared_ptr<Collective>& out, Error* error, F act) {
    if (pe.team != kTeamWorld) return report("all PEs do that together, not those of a team", error);
    if (pe.left) return report("this rank has left", error);
    auto collective = out = std::make_shared<Collective>();
    collective->world = pe.world;
    auto call = [collective, mine, act] {
        World& world = *collective->world;
        if (world.announcements == nullptr) world.announcements = allocate_announcements();
        if (world.announcements == nullptr) {  // on all PEs
            collective->code = report("the symmetric heap has no room at all", &collective->error);
            return;
        }
        std::vector<Announcement> all = exchange_announcements(*collective->world, mine);
        collective->code = compare(all, &collective->error);
        if (collective->code == 0) act(*collective, all);
    };
    if (int code = blocking(what, deadline, call, error, &pe.aborted)) return code;
    if (collective->code != 0) *error = collective->error;
    return collective->code;
}

int allocate(Domain domain, uint64_t bytes, uint64_t align, uint64_t deadline, void** out, Error* error) {
    std::shared_ptr<Collective> collective;
    uint64_t room = std::max<uint64_t>(bytes, 1), edge = std::max<uint64_t>(align, 64);
    int code = run_together(pe_of(domain), "allocation", Announcement{kAllocate, bytes, align}, deadline,
                            collective, error, [room, edge](Collective& c, const std::vector<Announcement>&) {
                                c.address = f().nvshmem_align(edge, room);
                            });
    if (code != 0) return code;
    if (collective->address == nullptr) {
        return report("no room for " + std::to_string(bytes) +
                          " bytes in the symmetric heap (NVSHMEM_SYMMETRIC_SIZE is its size)",
                      error);
    }
    *out = collective->address;
    return 0;
}

int free_memory(Domain domain, void* address, uint64_t deadline, Error* error) {
    Pe& pe = pe_of(domain);
    auto at = uint64_t(static_cast<char*>(address) - reinterpret_cast<char*>(pe.world->announcements));
    std::shared_ptr<Collective> collective;
    return run_together(
        pe, "free", Announcement{kFree, at}, deadline, collective, error,
        [address](Collective&, const std::vector<Announcement>&) { f().nvshmem_free(address); });
}

// Finds the teams that the PEs name, each once. Every member must name the team that it is in.
struct Team {
    int start, stride, size;
    auto operator<=>(const Team&) const = default;
    int at(int i) const { return start + i * stride; }
};
int teams_of(const std::vector<Announcement>& all, std::vector<Team>& teams, Error* error) {
    int world = int(all.size());
    auto named = [&](int pe) {
        const Announcement& said = all[size_t(pe)];
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
            return report(FaultCode::kMismatch,
                          "the team of rank " + std::to_string(pe) +
                              " is none (ranks i, i + k, i + 2 k ...), or its members name others",
                          error, {pe});
        }
        if (std::find(teams.begin(), teams.end(), team) == teams.end()) teams.push_back(team);
    }
    return 0;
}

void split(Collective& c, const std::vector<Announcement>& all) {
    std::vector<Team> teams;
    if ((c.code = teams_of(all, teams, &c.error)) != 0) return;
    for (const Team& team : teams) {  // all PEs create each team, in the same order
        int32_t made = kTeamInvalid;
        int stride = std::max(team.stride, 1);
        int result =
            f().nvshmem_team_split_strided(kTeamWorld, team.start, stride, team.size, nullptr, 0, &made);
        int place = -1;
        for (int i = 0; i < team.size; ++i) place = team.at(i) == c.world->rank ? i : place;
        if (place < 0) continue;
        if (result != 0 || made == kTeamInvalid) {
            c.code = report("nvshmem_team_split_strided failed (NVSHMEM_MAX_TEAMS is how many there can be)",
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
    std::shared_ptr<Collective> collective;
    Announcement mine{kSplit, uint64_t(int64_t(start)), uint64_t(int64_t(stride)), uint64_t(int64_t(size))};
    if (int code = run_together(pe, "team_split", mine, deadline, collective, error, split)) return code;
    if (collective->team == kTeamInvalid) return 0;
    auto made = std::make_unique<Pe>();
    made->world = pe.world, made->team = collective->team, made->rank = collective->rank,
    made->pes = collective->pes;
    *out = made.release();
    return 0;
}

}  // namespace

const Vtbl& nvshmem_table(const std::string& path, bool loaded_only) {
    // Opened even if NVSHMEM is open already, so that another library is reported as an error.
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
