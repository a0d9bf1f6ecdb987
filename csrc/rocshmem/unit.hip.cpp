// The table over rocSHMEM: a shared object of its own, because AMD ships a static library whose device code
// the user's compiler must link. `unicomm build rocshmem` builds it.
//
// Puts, gets, signals and barriers act in the order of their stream. The host waits only for the atomics,
// whose result it returns, and for the collectives of the table: init, allocate, free, team_split. rocSHMEM
// cannot be interrupted and does not notice dead PEs. Deadlines and aborts work while the host waits for a
// kernel, but not within the library's own collectives (init, malloc, free, team_split_strided).
#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>

#include "rocshmem/stream_functions.hpp"

namespace unicomm::rocshmem_unit {
namespace {

constexpr uint64_t kPage = 4096;  // least alignment of heaps, so that places in them are aligned alike

World the_world;
std::mutex starting;

std::string in_use() {
    return "rocSHMEM has one world a process, for which it was started with " +
           std::to_string(the_world.size) + " PEs: split that communicator, or start other processes";
}

// The size of the heaps is sent in the id, whose end rocSHMEM has always left empty.
struct Tail {
    char mark[8];
    uint64_t heap_bytes;
};
constexpr char kMark[8] = {'u', 'n', 'i', 'c', 'o', 'm', 'm', 0};
char* tail_of(UniqueId* id) { return id->bytes + sizeof id->bytes - sizeof(Tail); }

int unique_id(int world, uint64_t heap_bytes, UniqueId* out, Error* error) {
    std::lock_guard lock(starting);
    if (the_world.started) {
        if (the_world.size != world) return report(in_use(), error);
        *out = the_world.id;
        return 0;
    }
    *out = {};
    if constexpr (kByUniqueId) {
        Uid uid{};
        int code = rocshmem_get_uniqueid(&uid);
        if (code != 0) return report("rocshmem_get_uniqueid failed", error);
        static_assert(sizeof uid == sizeof *out);
        std::memcpy(out, &uid, sizeof uid);
    }
    if (heap_bytes == 0) return 0;
    static const Tail empty{};
    if (std::memcmp(tail_of(out), &empty, sizeof empty) != 0) {
        return report("rocSHMEM's id has no room for the size of heaps: set ROCSHMEM_HEAP_SIZE", error);
    }
    Tail tail{{}, heap_bytes};
    std::memcpy(tail.mark, kMark, sizeof kMark);
    std::memcpy(tail_of(out), &tail, sizeof tail);
    return 0;
}

int discard_id(const UniqueId*, Error*) { return 0; }

int start_library(UniqueId id, int rank, int world, Error* error) {
    Tail tail{};
    std::memcpy(&tail, tail_of(&id), sizeof tail);
    if (std::memcmp(tail.mark, kMark, sizeof kMark) == 0) {
        setenv("ROCSHMEM_HEAP_SIZE", std::to_string(tail.heap_bytes).c_str(), 1);
        std::memset(tail_of(&id), 0, sizeof tail);
    }
    if constexpr (kByUniqueId) {
        Uid uid{};
        std::memcpy(&uid, &id, sizeof uid);
        Attributes attributes{};
        int code = rocshmem_set_attr_uniqueid_args(rank, world, &uid, &attributes);
        if (code == 0) code = rocshmem_init_attr(kByUid, &attributes);
        if (code != 0) return report("rocshmem_init_attr failed: ROCSHMEM_DEBUG_LEVEL=INFO says why", error);
    } else {
        rocshmem_init();
        std::atexit([] {  // mpirun expects it; but it is collective, and not all PEs may come
            if (!the_world.broken && !the_world.given_up) rocshmem_finalize();
        });
    }
    if (rocshmem_my_pe() != rank || rocshmem_n_pes() != world) {
        return report(
            "this is PE " + std::to_string(rocshmem_my_pe()) + " of " + std::to_string(rocshmem_n_pes()) +
                " of rocSHMEM, but rank " + std::to_string(rank) + " of " + std::to_string(world) +
                (kByUniqueId ? ""
                             : ": before 3.0 the communicator must have all processes of mpirun, in their "
                               "order"),
            error);
    }
    return 0;
}

int open_world(World& w, int rank, int world, int device, Error* error) {
    w.rank = rank;
    int code = checked(hipDeviceGetAttribute(&w.wave, hipDeviceAttributeWarpSize, device),
                       "hipDeviceGetAttribute", error);
    for (hipStream_t* stream : {&w.stream, &w.glance}) {
        if (code == 0) {
            code = checked(hipStreamCreateWithFlags(stream, hipStreamNonBlocking), "hipStreamCreateWithFlags",
                           error);
        }
    }
    if (code == 0) {
        code =
            checked(hipEventCreateWithFlags(&w.met, hipEventDisableTiming), "hipEventCreateWithFlags", error);
    }
    void* host = nullptr;
    size_t words = sizeof(Words) * size_t(world + 1);
    if (code == 0)
        code = checked(hipHostMalloc(&host, words + 64, hipHostMallocDefault), "hipHostMalloc", error);
    if (code != 0) return code;
    w.draft = static_cast<Words*>(host);
    w.result = reinterpret_cast<uint64_t*>(static_cast<char*>(host) + words);
    w.said = static_cast<Words*>(rocshmem_malloc(sizeof(Words) * size_t(world)));
    if (w.said == nullptr) return report("no room in the symmetric heap: set ROCSHMEM_HEAP_SIZE", error);
    code = checked(hipMemset(w.said, 0, sizeof(Words) * size_t(world)), "hipMemset", error);
    if (code == 0) code = checked(hipDeviceSynchronize(), "hipDeviceSynchronize", error);
    // On the host, as at the end of rocSHMEM's malloc: no PE writes what another is about to clear.
    rocshmem_barrier_all();
    return code;
}

// Starts the library in a thread of its own: it does not return until all PEs come, and cannot be
// interrupted.
int start(World& w, const UniqueId& id, int rank, int world, uint64_t deadline, Error* error) {
    struct Result {
        Error error{};
        int code = 0;
    };
    int device = 0;
    if (int code = checked(hipGetDevice(&device), "hipGetDevice", error)) return code;
    auto promise = std::make_shared<std::promise<Result>>();
    auto future = promise->get_future();
    std::thread([promise, &w, id, rank, world, device] {
        Result r;
        r.code = checked(hipSetDevice(device), "hipSetDevice", &r.error);
        if (r.code == 0) r.code = start_library(id, rank, world, &r.error);
        if (r.code == 0) r.code = open_world(w, rank, world, device, &r.error);
        promise->set_value(r);
    }).detach();
    uint64_t now = now_ns();
    auto left = std::chrono::nanoseconds(deadline > now ? std::min(deadline - now, uint64_t{1} << 60) : 0);
    if (future.wait_for(left) != std::future_status::ready) {
        return report(FaultCode::kTimeout,
                      "rocSHMEM did not start in time, and cannot be interrupted: end the processes", error);
    }
    Result r = future.get();
    if (r.code != 0) *error = r.error;
    return r.code;
}

// Frees what earlier domains have left, once all PEs know that there are none: no PE frees alone.
void clear(World& w) {
    std::map<uint64_t, void*> left;
    for (auto& [at, block] : w.blocks) left[block.turn] = block.start;
    w.blocks.clear();
    for (auto& [turn, start] : left) rocshmem_free(start);
}

// The first call starts the library. Later calls join it by the same id, also while there are domains.
int init(const UniqueId* id, int rank, int world, const char*, uint64_t deadline, Domain* out, Error* error) {
    std::lock_guard lock(starting);
    World& w = the_world;
    if (w.broken) return report("rocSHMEM failed in this process before, and starts once: end it", error);
    if (!w.started) {
        w.started = true, w.id = *id, w.size = world;
        if (int code = start(w, *id, rank, world, deadline, error)) {
            w.broken = true;
            return code;
        }
    } else if (w.rank != rank || w.size != world || std::memcmp(&w.id, id, sizeof *id) != 0) {
        return report(in_use(), error);
    }
    auto part = std::make_unique<Part>();
    part->world = &w, part->team = ROCSHMEM_TEAM_WORLD, part->whole = true, part->rank = rank;
    for (int pe = 0; pe < world; ++pe) part->pes.push_back(pe);
    part->round = uint64_t(++w.inits) << 32;
    std::vector<Words> all;
    if (int code = meet(*part, kInit, uint64_t(w.domains), 0, 0, deadline, all, error)) return code;
    if (std::all_of(all.begin(), all.end(), [](const Words& said) { return said.a == 0; })) clear(w);
    ++w.domains;
    *out = part.release();
    return 0;
}

// rocSHMEM cannot notify other PEs.
int leave(Domain, Error*) { return 0; }

// Ends waits of the host in this domain. A wait of a stream continues, and the library is not told: it cannot
// end a single communicator.
int abort_domain(Domain domain, int, const Error*, Error*) {
    part_of(domain).world->given_up = true;
    part_of(domain).aborted = true;
    return 0;
}

// The slot of a team in the library stays occupied: freeing it is collective.
int release(Domain domain, Error*) {
    std::unique_ptr<Part> part(&part_of(domain));
    std::lock_guard lock(starting);
    if (part->whole) --part->world->domains;
    return 0;
}

int allocate(Domain domain, uint64_t bytes, uint64_t align, uint64_t deadline, void** out, Error* error) {
    Part& part = part_of(domain);
    World& w = *part.world;
    if (!part.whole) return report("a team has no memory of its own", error);
    if (int code = agree(part, kAllocate, bytes, align, deadline, error)) return code;
    align = std::max<uint64_t>(align, sizeof(void*));
    if (align > kPage || (align & (align - 1)) != 0) {
        return report("an alignment is a power of 2 of at most 4096, not " + std::to_string(align), error);
    }
    void *start = nullptr, *place = nullptr;
    if constexpr (kHostAlign) {
        place = start = rocshmem_align(align, std::max<uint64_t>(bytes, 1));
    } else {
        start = rocshmem_malloc(bytes + align);
        place = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(start) + align - 1) & ~(align - 1));
    }
    if (start == nullptr) {
        return report("no room for " + std::to_string(bytes) + " bytes in the symmetric heap", error);
    }
    w.blocks[place] = {start, bytes, ++w.turns};
    *out = place;
    return 0;
}

int free_memory(Domain domain, void* address, uint64_t deadline, Error* error) {
    Part& part = part_of(domain);
    World& w = *part.world;
    auto found = w.blocks.find(address);
    uint64_t turn = found == w.blocks.end() ? 0 : found->second.turn;  // addresses differ between PEs
    if (int code = agree(part, kFree, turn, 0, deadline, error)) return code;
    if (turn == 0) return report("nothing was allocated there", error);
    rocshmem_free(found->second.start);
    w.blocks.erase(found);
    return 0;
}

struct Shape {  // a team, as PEs of the domain that is split; size 0: no team
    int start, stride, size;
    bool operator<(const Shape& o) const {
        return std::tie(start, stride, size) < std::tie(o.start, o.stride, o.size);
    }
    int place(int pe) const {
        int at = pe - start;
        return at >= 0 && at % stride == 0 && at / stride < size ? at / stride : -1;
    }
};

// Finds the teams that the PEs name. Every member of a team must name it.
int shapes_of(const std::vector<Words>& all, std::set<Shape>& shapes, Error* error) {
    int n = int(all.size());
    auto named = [&](int pe) {
        const Words& w = all[size_t(pe)];
        return Shape{int(int64_t(w.a)), w.c == 1 ? 1 : int(int64_t(w.b)), int(int64_t(w.c))};
    };
    for (int pe = 0; pe < n; ++pe) {
        Shape shape = named(pe);
        bool good = all[size_t(pe)].what == kSplit && shape.size >= 0;
        if (good && shape.size == 0) continue;
        good = good && shape.size <= n && shape.stride > 0 && shape.stride <= n && shape.start >= 0 &&
               shape.start + int64_t(shape.size - 1) * shape.stride < n;
        for (int other = 0; good && other < n; ++other) {
            Shape theirs = named(other);
            good = shape.place(other) < 0 || (!(shape < theirs) && !(theirs < shape));
        }
        if (!good) {
            return report(FaultCode::kMismatch,
                          "the team of rank " + std::to_string(pe) +
                              " is none (ranks i, i + k, i + 2 k ...), or its members name others",
                          error, {pe});
        }
        shapes.insert(shape);
    }
    return 0;
}

// The library creates one team at a time, by all PEs with the same arguments. So all PEs exchange which team
// they want, and create all teams in the same order.
[[maybe_unused]] int team_split(Domain domain, int start, int stride, int size, uint64_t deadline,
                                Domain* out, Error* error) {
    Part& part = part_of(domain);
    *out = nullptr;
    auto word = [](int number) { return uint64_t(int64_t(number)); };
    std::vector<Words> all;
    std::set<Shape> shapes;
    int code = meet(part, kSplit, word(start), word(stride), word(size), deadline, all, error);
    if (code == 0) code = shapes_of(all, shapes, error);
    for (const Shape& shape : shapes) {
        if (code != 0) break;
        Team team = ROCSHMEM_TEAM_INVALID;
        int result =
            rocshmem_team_split_strided(part.team, shape.start, shape.stride, shape.size, nullptr, 0, &team);
        int place = shape.place(part.rank);
        if (place < 0) continue;
        if (result != 0 || team == ROCSHMEM_TEAM_INVALID) {
            return report(
                "rocshmem_team_split_strided failed: ROCSHMEM_MAX_NUM_TEAMS is how many there can be", error);
        }
        auto made = std::make_unique<Part>();
        made->world = part.world, made->team = team, made->rank = place;
        made->round = (part.round * 31 + uint64_t(shape.start) * 7 + uint64_t(shape.stride)) << 32 | 1;
        for (int i = 0; i < shape.size; ++i) {
            made->pes.push_back(part.pes[size_t(shape.start + i * shape.stride)]);
        }
        *out = made.release();
    }
    return code;
}

Vtbl make() {
    Vtbl t{};
    t.name = "rocSHMEM";
    constexpr bool moves = (kHostPut || kDevicePut) && (kHostGet || kDeviceGet);
    static_assert(kBarrier && moves, "this rocSHMEM has no barrier, put or get that is known here");
    t.unique_id = unique_id, t.discard_id = discard_id, t.init = init, t.leave = leave, t.release = release;
    t.abort = abort_domain;
    t.allocate = allocate, t.free = free_memory, t.barrier = barrier;
    if constexpr (kHostPtr) t.ptr = ptr;
    t.put = put, t.get = get, t.put_nbi = put_nbi, t.get_nbi = get_nbi, t.fence = fence, t.quiet = quiet;
    if constexpr ((kHostPutSignal || kDevicePutSignal) && (kHostWait || kDeviceWait)) {
        t.put_signal = put_signal, t.wait_signal = wait_signal;
    }
    if constexpr (kDeviceFetchAdd && kDeviceCompareSwap)
        t.fetch_add = fetch_add, t.compare_swap = compare_swap;
    if constexpr (kTeamBarrier) t.team_split = team_split;
    t.capabilities = capabilities_of(t);
    return t;
}

}  // namespace
}  // namespace unicomm::rocshmem_unit

extern "C" __attribute__((visibility("default"))) const unicomm::symm::Vtbl* unicomm_symm_table(
    uint32_t abi) {
    static const unicomm::symm::Vtbl table = unicomm::rocshmem_unit::make();
    return abi == unicomm::symm::kTableAbi ? &table : nullptr;
}
