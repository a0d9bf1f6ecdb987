// The table over shared memory of this host: one memfd with a part for each PE, mapped by all, and beside it
// a shm segment, whose Group knows which PEs are alive and which have given up.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "base/clock.hpp"
#include "shm/group.hpp"
#include "symm/arena.hpp"
#include "symm/table_error.hpp"
#include "symm/tables/tables.hpp"

namespace unicomm::symm {
namespace {

using shm::Group;
using shm::Segment;

constexpr uint64_t kPage = 4096, kLine = 64;
constexpr uint64_t kMostBytes = uint64_t{1} << 44;  // address space used by default; x86-64 has 47 bits

struct HostId {
    uint64_t id;
    uint64_t part;  // bytes of the heap of one PE
    int32_t pid, segment_fd, heap_fd, world;
};
static_assert(sizeof(HostId) <= sizeof(UniqueId));

// The heaps of all PEs, one after the other. Pages exist from the first access until they are freed.
class Memory {
  public:
    Memory(const HostId& id, int rank) : part_(id.part), rank_(rank), bytes_(id.part * uint64_t(id.world)) {
        std::string path = "/proc/" + std::to_string(id.pid) + "/fd/" + std::to_string(id.heap_fd);
        int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
        if (fd < 0) throw_errno("cannot open the symmetric heap of process " + std::to_string(id.pid));
        struct stat info{};
        bool good = fstat(fd, &info) == 0 && uint64_t(info.st_size) == bytes_;
        void* mem = !good ? MAP_FAILED
                          : mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        close(fd);
        if (!good) throw SystemFailure("what was offered as symmetric heap has another size");
        if (mem == MAP_FAILED) {
            throw_errno("cannot map " + std::to_string(bytes_) + " bytes of symmetric heaps");
        }
        base_ = static_cast<char*>(mem);
    }
    ~Memory() { munmap(base_, bytes_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    char* mine() const { return base_ + part_ * uint64_t(rank_); }
    // The address on `pe` of what this PE has at `address`; null if not all of it is in the heap.
    char* of(const void* address, uint64_t bytes, int pe) const {
        auto at = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(mine());
        if (at > part_ || bytes > part_ - at) return nullptr;
        return base_ + part_ * uint64_t(pe) + at;
    }

  private:
    uint64_t part_;
    int rank_;
    uint64_t bytes_;
    char* base_ = nullptr;
};

enum Meeting : uint32_t { kStart = 1, kAllocate, kFree, kBarrier, kSplit };

// Operation codes of unicomm/comms/operations/table.py, for reports of deadlocks.
constexpr uint32_t kOperation[] = {0, 64, 65, 66, 67, 67}, kWaitSignal = 72;  // by Meeting

// What a PE publishes at a meeting. Each PE has two, used in turn, like shm::Announcement.
struct Arrival {
    std::atomic<uint64_t> round;  // written last
    uint32_t what;
    uint64_t a, b;  // must be the same on all PEs, except at a split
    int32_t start, stride, size;
    HostId id;
};

struct Host {
    std::shared_ptr<Memory> memory;
    std::shared_ptr<Segment> segment;
    std::vector<int> pes;   // PEs of the heap
    std::vector<int> pids;  // processes of the domain's PEs
    int rank = 0;
    std::unique_ptr<Group> group;
    std::unique_ptr<Arena> arena;  // null in a team
    uint64_t round = 0;
    bool streaming = false;  // large copies until `quiet` bypass the caches

    int world() const { return int(pes.size()); }
    Arrival& arrival(int pe, uint64_t of) { return *reinterpret_cast<Arrival*>(segment->slot(pe, of)); }

    // Returns when all PEs are at this meeting and have passed the same values. At a split they may differ.
    Fault meet(Meeting what, uint64_t a, uint64_t b, uint64_t deadline, const Arrival* more = nullptr) {
        if (Fault f = group->lost({})) return f;
        Arrival& mine = arrival(rank, ++round);
        mine.what = what, mine.a = a, mine.b = b;
        if (more)
            mine.start = more->start, mine.stride = more->stride, mine.size = more->size, mine.id = more->id;
        mine.round.store(round, std::memory_order_release);
        group->wake();
        auto absent = [this] {
            std::vector<int> missing;
            for (int pe = 0; pe < world(); ++pe) {
                if (arrival(pe, round).round.load(std::memory_order_acquire) < round) missing.push_back(pe);
            }
            return missing;
        };
        shm::WaitKind kind{kOperation[what]};
        if (Fault f = group->await([&] { return absent().empty(); }, absent, deadline, &kind)) return f;
        Fault differ{FaultCode::kMismatch, {}, {}, ""};
        for (int pe = 0; pe < world(); ++pe) {
            Arrival& other = arrival(pe, round);
            if (other.what != what || other.a != a || other.b != b) differ.culprits.push_back(pe);
        }
        if (differ.culprits.empty()) return {};
        differ.culprits.clear();
        static const char* names[] = {"", "init", "allocate", "free", "barrier", "team_split"};
        for (int pe = 0; pe < world(); ++pe) {  // the same list on all PEs: none can say who is right
            Arrival& other = arrival(pe, round);
            differ.culprits.push_back(pe);
            differ.detail += (pe ? "; rank " : "rank ") + std::to_string(pe) + ": " +
                             (other.what <= kSplit ? names[other.what] : "?");
            if (other.what == kAllocate) differ.detail += " " + std::to_string(other.a) + " bytes";
            if (other.what == kFree) differ.detail += " at " + std::to_string(other.a);
        }
        return differ;
    }
};

struct Pending {  // an id that was created and not used yet
    std::shared_ptr<Segment> segment;
    int heap_fd = -1;
    ~Pending() {
        if (heap_fd >= 0) close(heap_fd);
    }
};
std::mutex pending_mutex;
std::map<uint64_t, std::unique_ptr<Pending>> pending;

int report(const Fault& fault, Error* error) {
    return fault ? symm::report(fault.code, fault.detail, error, fault.culprits) : 0;
}

Fault internal(const std::string& detail) { return {FaultCode::kInternal, {}, {}, detail}; }

template <class F>
int guarded(Error* error, F run) {
    try {
        return report(run(), error);
    } catch (const std::exception& failure) {
        return report(internal(failure.what()), error);
    }
}

Host& host_of(Domain domain) { return *static_cast<Host*>(domain); }

HostId make_id(int world, uint64_t part) {
    auto made = std::make_unique<Pending>();
    made->segment = std::make_shared<Segment>(world, uint32_t(kPage), uint32_t(kPage));
    made->heap_fd = memfd_create("unicomm-symmetric", MFD_CLOEXEC);
    if (made->heap_fd < 0) throw_errno("cannot create a symmetric heap (memfd_create)");
    if (fchmod(made->heap_fd, 0600) != 0 || ftruncate(made->heap_fd, off_t(part * uint64_t(world))) != 0) {
        throw_errno("cannot size the symmetric heap");
    }
    HostId id{made->segment->id(), part, int32_t(getpid()), made->segment->fd(), made->heap_fd, world};
    std::lock_guard lock(pending_mutex);
    pending[id.id] = std::move(made);
    return id;
}

void discard(uint64_t id) {
    std::lock_guard lock(pending_mutex);
    pending.erase(id);
}

int unique_id(int world, uint64_t heap_bytes, UniqueId* out, Error* error) {
    return guarded(error, [&]() -> Fault {
        uint64_t machine = uint64_t(sysconf(_SC_PHYS_PAGES)) * uint64_t(sysconf(_SC_PAGESIZE));
        uint64_t part = heap_bytes ? heap_bytes : std::min(machine, kMostBytes / uint64_t(world));
        HostId id = make_id(world, (part + kPage - 1) / kPage * kPage);
        std::memset(out, 0, sizeof *out);
        std::memcpy(out, &id, sizeof id);
        return {};
    });
}

int discard_id(const UniqueId* id, Error*) {
    HostId read;
    std::memcpy(&read, id, sizeof read);
    discard(read.id);
    return 0;
}

// The PEs publish their processes, so that each can see the others die.
Fault join(Host& host, const char* name, uint64_t deadline) {
    int world = host.world();
    auto pid_of = [&](int pe) -> std::atomic<uint32_t>& { return host.segment->control(pe).pid; };
    pid_of(host.rank).store(uint32_t(getpid()));
    shm::Waiter waiter(*host.segment, host.rank);
    waiter.wake_others();
    std::vector<int> absent;
    auto ready = [&] {
        absent.clear();
        for (int pe = 0; pe < world; ++pe) {
            if (pid_of(pe).load() == 0) absent.push_back(pe);
        }
        return absent.empty();
    };
    if (!waiter.until(ready, [&](bool) { return now_ns() >= deadline; })) {
        return {FaultCode::kTimeout, absent, {}, ""};
    }
    for (int pe = 0; pe < world; ++pe) host.pids.push_back(int(pid_of(pe).load()));
    host.group = std::make_unique<Group>(host.segment, host.rank, host.pids, name);
    return host.meet(kStart, 0, 0, deadline);
}

int init(const UniqueId* uid, int rank, int world, const char* name, uint64_t deadline, Domain* out,
         Error* error) {
    return guarded(error, [&]() -> Fault {
        HostId id;
        std::memcpy(&id, uid, sizeof id);
        if (id.world != world || rank < 0 || rank >= world) {
            return internal("the id is for " + std::to_string(id.world) + " PEs");
        }
        auto host = std::make_unique<Host>();
        host->segment = std::make_shared<Segment>(id.pid, id.segment_fd);
        host->segment->close_fd();
        if (host->segment->layout().world != world) return internal("the id is of another segment");
        host->memory = std::make_shared<Memory>(id, rank);
        host->rank = rank;
        for (int pe = 0; pe < world; ++pe) host->pes.push_back(pe);
        host->arena = std::make_unique<Arena>(0, id.part);
        Fault fault = join(*host, name, deadline);
        if (rank == 0) discard(id.id);  // all have mapped it
        if (!fault) *out = host.release();
        return fault;
    });
}

// A forked child has the domain of its parent, and must not act for it.
bool ours(Host& host) { return host.pids[size_t(host.rank)] == int(getpid()); }

int leave(Domain domain, Error*) {
    if (ours(host_of(domain))) host_of(domain).group->finalize();
    return 0;
}

int release(Domain domain, Error*) {
    delete &host_of(domain);
    return 0;
}

int abort_domain(Domain domain, int code, const Error* why, Error*) {
    Host& host = host_of(domain);
    if (!ours(host)) return 0;
    if (code == 0) {
        host.group->abort();
    } else {
        host.group->give_up(FaultCode(code), {why->culprits, why->culprits + why->n_culprits});
    }
    return 0;
}

int allocate(Domain domain, uint64_t bytes, uint64_t align, uint64_t deadline, void** out, Error* error) {
    return guarded(error, [&]() -> Fault {
        Host& host = host_of(domain);
        std::lock_guard lock(host.group->running());
        if (!host.arena) return internal("memory is allocated by all PEs, not by a team");
        if (Fault f = host.meet(kAllocate, bytes, align, deadline)) return f;
        // Large blocks take whole pages, so that the pages can be freed.
        uint64_t least = bytes >= kPage ? kPage : kLine, at = 0;
        uint64_t whole = (std::max<uint64_t>(bytes, 1) + least - 1) / least * least;
        if (!host.arena->take(whole, std::max(align, least), at)) {
            return internal("no room for " + std::to_string(bytes) + " bytes in the symmetric heap");
        }
        *out = host.memory->mine() + at;
        return {};
    });
}

int free_memory(Domain domain, void* address, uint64_t deadline, Error* error) {
    return guarded(error, [&]() -> Fault {
        Host& host = host_of(domain);
        std::lock_guard lock(host.group->running());
        auto at = uint64_t(static_cast<char*>(address) - host.memory->mine());
        if (!host.arena || host.arena->size(at) == 0) return internal("nothing was allocated there");
        if (Fault f = host.meet(kFree, at, 0, deadline)) return f;
        uint64_t bytes = host.arena->size(at);
        if (bytes >= kPage) madvise(address, bytes, MADV_REMOVE);
        host.arena->give(at);
        // The block is reused only after all PEs have freed its pages.
        return host.meet(kFree, at, 1, deadline);
    });
}

int barrier(Domain domain, uint64_t deadline, Stream, Error* error) {
    return guarded(error, [&]() -> Fault {
        Host& host = host_of(domain);
        std::lock_guard lock(host.group->running());
        return host.meet(kBarrier, 0, 0, deadline);
    });
}

// The address on the other PE, or null with the error.
char* there(Host& host, const void* address, uint64_t bytes, int pe, Error* error, int& code) {
    char* place =
        pe >= 0 && pe < host.world() ? host.memory->of(address, bytes, host.pes[size_t(pe)]) : nullptr;
    code = place ? 0 : report(internal("outside of the symmetric heap, or no such PE"), error);
    return place;
}

int ptr(Domain domain, const void* address, uint64_t bytes, int pe, void** out, Error* error) {
    int code;
    *out = there(host_of(domain), address, bytes, pe, error, code);
    return code;
}

// Nothing may be copied from or to nowhere.
void copy(void* to, const void* from, uint64_t bytes) {
    if (bytes) std::memmove(to, from, bytes);
}

int put(Domain domain, void* to, const void* from, uint64_t bytes, int pe, Stream, Error* error) {
    int code;
    if (char* place = there(host_of(domain), to, bytes, pe, error, code)) copy(place, from, bytes);
    return code;
}

int get(Domain domain, void* to, const void* from, uint64_t bytes, int pe, Stream, Error* error) {
    int code;
    if (char* place = there(host_of(domain), from, bytes, pe, error, code)) copy(to, place, bytes);
    return code;
}

// Large transfers of all PEs fill the caches that they share: the reader finds the data in memory either way,
// and stores that bypass the caches need not read the lines first. Measured in docs/design/symm.md.
constexpr uint64_t kPastCaches = 16 << 20;
constexpr uint64_t kLeastStreamed = kPage;

int expect(Domain domain, uint64_t bytes, Error*) {
    Host& host = host_of(domain);
    host.streaming = bytes >= kPastCaches / uint64_t(host.world());
    return 0;
}

void move(Host& host, void* to, const void* from, uint64_t bytes) {
    auto* target = static_cast<char*>(to);
    auto* source = static_cast<const char*>(from);
    const bool apart = target + bytes <= source || source + bytes <= target;  // a stream runs forwards
    if (host.streaming && apart && bytes >= kLeastStreamed) {
        shm::Stager::stream(target, source, bytes);
    } else {
        copy(to, from, bytes);
    }
}

int put_nbi(Domain domain, void* to, const void* from, uint64_t bytes, int pe, Stream, Error* error) {
    int code;
    if (char* place = there(host_of(domain), to, bytes, pe, error, code))
        move(host_of(domain), place, from, bytes);
    return code;
}

int get_nbi(Domain domain, void* to, const void* from, uint64_t bytes, int pe, Stream, Error* error) {
    int code;
    if (char* place = there(host_of(domain), from, bytes, pe, error, code))
        move(host_of(domain), to, place, bytes);
    return code;
}

int fence(Domain, Stream, Error*) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return 0;
}

int quiet(Domain domain, Stream stream, Error* error) {
    host_of(domain).streaming = false;
    return fence(domain, stream, error);
}

std::atomic_ref<uint64_t> word(void* place) {
    return std::atomic_ref<uint64_t>(*static_cast<uint64_t*>(place));
}

int put_signal(Domain domain, void* to, const void* from, uint64_t bytes, uint64_t* signal, uint64_t value,
               SignalOp op, int pe, Stream stream, Error* error) {
    Host& host = host_of(domain);
    int code;
    char* place = there(host, signal, sizeof value, pe, error, code);
    if (!place) return code;
    if (bytes) code = put(domain, to, from, bytes, pe, stream, error);
    if (code) return code;
    if (op == SignalOp::kAdd) {
        word(place).fetch_add(value);
    } else {
        word(place).store(value);
    }
    host.group->wake();
    return 0;
}

bool holds(uint64_t now, Compare compare, uint64_t value) {
    switch (compare) {
        case Compare::kEq:
            return now == value;
        case Compare::kNe:
            return now != value;
        case Compare::kGt:
            return now > value;
        case Compare::kGe:
            return now >= value;
        case Compare::kLt:
            return now < value;
        case Compare::kLe:
            return now <= value;
    }
    return false;
}

int wait_signal(Domain domain, const uint64_t* signal, Compare compare, uint64_t value, int source,
                uint64_t deadline, Stream, Error* error) {
    return guarded(error, [&]() -> Fault {
        Host& host = host_of(domain);
        int code, pe = source < 0 ? ~source : source;
        if (!there(host, signal, sizeof value, pe, error, code)) return internal(error->detail);
        std::lock_guard lock(host.group->running());
        auto ready = [&] { return holds(word(const_cast<uint64_t*>(signal)).load(), compare, value); };
        shm::WaitKind kind{kWaitSignal};
        kind.guessed = source < 0;
        return host.group->await(ready, [&] { return std::vector<int>{pe}; }, deadline, &kind);
    });
}

int fetch_add(Domain domain, uint64_t* target, uint64_t value, int pe, uint64_t* before, Stream,
              Error* error) {
    int code;
    char* place = there(host_of(domain), target, sizeof value, pe, error, code);
    if (!place) return code;
    *before = word(place).fetch_add(value);
    host_of(domain).group->wake();  // another PE may wait for the word
    return 0;
}

int compare_swap(Domain domain, uint64_t* target, uint64_t expected, uint64_t value, int pe, uint64_t* before,
                 Stream, Error* error) {
    int code;
    char* place = there(host_of(domain), target, sizeof value, pe, error, code);
    if (!place) return code;
    word(place).compare_exchange_strong(expected, value);
    *before = expected;
    host_of(domain).group->wake();
    return 0;
}

int team_split(Domain domain, int start, int stride, int size, uint64_t deadline, Domain* out, Error* error) {
    return guarded(error, [&]() -> Fault {
        Host& host = host_of(domain);
        std::lock_guard lock(host.group->running());
        *out = nullptr;
        Arrival mine{};
        mine.start = start, mine.stride = stride, mine.size = size;
        int last = size > 0 ? start + (size - 1) * stride : start;
        bool good = size == 0 || (stride != 0 && start >= 0 && start < host.world() && last >= 0 &&
                                  last < host.world() && size <= host.world());
        int place = -1;
        for (int i = 0; good && i < size; ++i) {
            if (start + i * stride == host.rank) place = i;
        }
        std::string trouble;
        if (good && place == 0) {
            try {
                mine.id = make_id(size, kPage);
            } catch (const std::exception& failure) {
                trouble = failure.what();
            }
        }
        mine.size = good && trouble.empty() ? size : -1;
        if (Fault f = host.meet(kSplit, 0, 0, deadline, &mine)) {
            discard(mine.id.id);
            return f;
        }
        // Each PE checks the same list, so that all reach the same result.
        for (int pe = 0; pe < host.world(); ++pe) {
            Arrival& other = host.arrival(pe, host.round);
            bool same = other.size >= 0;
            for (int i = 0; same && i < other.size; ++i) {
                Arrival& member = host.arrival(other.start + i * other.stride, host.round);
                bool own = member.start == other.start && member.stride == other.stride;
                same = own && member.size == other.size;
            }
            if (!same) {
                discard(mine.id.id);
                return {FaultCode::kMismatch,
                        {pe},
                        {},
                        "the team of rank " + std::to_string(pe) + " is none, or its members name others"};
            }
        }
        if (place < 0) return {};
        HostId id = host.arrival(start, host.round).id;
        auto team = std::make_unique<Host>();
        team->segment = std::make_shared<Segment>(id.pid, id.segment_fd);
        team->segment->close_fd();
        team->memory = host.memory;
        team->rank = place;
        for (int i = 0; i < size; ++i) team->pes.push_back(host.pes[size_t(start + i * stride)]);
        Fault fault = join(*team, "team", deadline);
        if (place == 0) discard(id.id);
        if (!fault) *out = team.release();
        return fault;
    });
}

}  // namespace

const Vtbl& host_table() {
    static const Vtbl table = [] {
        Vtbl t{};
        t.name = "host";
        t.unique_id = unique_id, t.discard_id = discard_id, t.init = init, t.leave = leave;
        t.release = release, t.abort = abort_domain, t.allocate = allocate, t.free = free_memory;
        t.barrier = barrier, t.ptr = ptr, t.put = put, t.get = get;
        t.put_nbi = put_nbi, t.get_nbi = get_nbi, t.expect = expect;
        t.fence = fence, t.quiet = quiet, t.put_signal = put_signal, t.wait_signal = wait_signal;
        t.fetch_add = fetch_add, t.compare_swap = compare_swap, t.team_split = team_split;
        t.capabilities = capabilities_of(t);
        return t;
    }();
    return table;
}

}  // namespace unicomm::symm
