// What the mock does: heaps of several processes in one shared memory of the host. Stricter than a real
// library: what was put is delivered by quiet, fence or a barrier and not before, PEs must make the same
// collective calls, functions of work-groups are called by whole ones, and who waits in vain for two minutes
// ends the process.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <rocshmem/rocshmem.hpp>
#include <string>
#include <thread>
#include <vector>

namespace {

using mock_hip::block;
using mock_hip::misused;

constexpr int kMostPes = 16, kMostTeams = 41;

struct Meeting {
    std::atomic<uint64_t> arrived;
};

struct Shared {
    std::atomic<int> joined, teams;
    Meeting on_host, on_device[kMostTeams];
    uint64_t said[kMostPes][4];  // arguments of a collective call
};

struct TeamOf {
    int id = 0, rank = 0;
    std::vector<int> pes;
    uint64_t meetings = 0, host_meetings = 0;
};

struct Waiting {  // a put or get until quiet
    char *to, *from;
    std::vector<char> bytes;
    size_t size;
};

int me = -1, world = 0;
uint64_t heap_bytes = 0;
char* base = nullptr;
Shared* shared = nullptr;
TeamOf everybody;
std::map<uint64_t, uint64_t> used;  // offset -> bytes
std::mutex mutex;
std::vector<Waiting> waiting;

constexpr uint64_t up(uint64_t bytes, uint64_t step) { return (bytes + step - 1) / step * step; }
char* heap_of(int pe) { return base + up(sizeof(Shared), 4096) + uint64_t(pe) * up(heap_bytes, 4096); }

char* there(const void* address, size_t bytes, int pe) {
    auto at = uint64_t(static_cast<const char*>(address) - heap_of(me));
    if (at > heap_bytes || bytes > heap_bytes - at || pe < 0 || pe >= world) misused("outside of the heap");
    return heap_of(pe) + at;
}

template <class Condition>
void until(Condition condition) {
    auto end = std::chrono::steady_clock::now() + std::chrono::minutes(2);
    for (int turn = 0; !condition(); ++turn) {
        if (std::chrono::steady_clock::now() > end) misused("waited in vain");
        std::this_thread::sleep_for(std::chrono::microseconds(turn < 100 ? 0 : 50));  // cores are few
    }
}

void meet(Meeting& meeting, uint64_t& count, size_t size) {
    ++count;
    ++meeting.arrived;
    until([&] { return meeting.arrived >= count * size; });
}

void deliver() {
    std::lock_guard lock(mutex);
    for (Waiting& w : waiting) {
        if (!w.bytes.empty()) {
            std::memcpy(w.to, w.bytes.data(), w.size);
        } else {
            std::memcpy(w.to, w.from, w.size);
        }
    }
    waiting.clear();
}

void meet_on_device(TeamOf& team) { meet(shared->on_device[team.id], team.meetings, team.pes.size()); }

void agree(TeamOf& team, std::vector<uint64_t> arguments) {
    auto together = [&] {
        static Meeting* meetings = shared->on_device;  // a team's collectives on the host come one at a time
        meet(meetings[team.id], team.meetings, team.pes.size());
    };
    std::copy(arguments.begin(), arguments.end(), shared->said[me]);
    together();
    for (int pe : team.pes) {
        for (size_t i = 0; i < arguments.size(); ++i) {
            if (shared->said[pe][i] != arguments[i]) misused("PEs differ in a collective call");
        }
    }
    together();
}

// Of the device.

void needs_group() {
    if (ROCSHMEM_MOCK_VERSION < 30100 && !block.entered) misused("rocshmem_wg_init was not called");
}

// True for one thread of a work-group: the last that comes.
bool whole_group() {
    needs_group();
    return ++block.calls % int(block.threads) == 0;
}

std::atomic<uint64_t>& word(uint64_t* dest, int pe) {
    return *reinterpret_cast<std::atomic<uint64_t>*>(there(dest, sizeof *dest, pe));
}

bool compares(uint64_t a, int cmp, uint64_t b) {
    switch (cmp) {
        case rocshmem::ROCSHMEM_CMP_EQ:
            return a == b;
        case rocshmem::ROCSHMEM_CMP_NE:
            return a != b;
        case rocshmem::ROCSHMEM_CMP_GT:
            return a > b;
        case rocshmem::ROCSHMEM_CMP_GE:
            return a >= b;
        case rocshmem::ROCSHMEM_CMP_LT:
            return a < b;
        case rocshmem::ROCSHMEM_CMP_LE:
            return a <= b;
    }
    misused("no such comparison");
}

void start(int rank, int n, const std::string& name) {
    if (base != nullptr) misused("initialised twice");
    const char* size = std::getenv("ROCSHMEM_HEAP_SIZE");
    heap_bytes = size ? std::strtoull(size, nullptr, 10) : uint64_t{1} << 20;
    me = rank, world = n;
    size_t total = up(sizeof(Shared), 4096) + uint64_t(n) * up(heap_bytes, 4096);
    int fd = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
    if (fd < 0 || ftruncate(fd, off_t(total)) != 0) misused("no shared memory");
    void* memory = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED) misused("cannot map shared memory");
    base = static_cast<char*>(memory);
    shared = reinterpret_cast<Shared*>(base);
    everybody.rank = rank;
    for (int pe = 0; pe < n; ++pe) everybody.pes.push_back(pe);
    ++shared->joined;
    until([&] { return shared->joined >= n; });
    if (rank == 0) shm_unlink(name.c_str());
}

uint64_t* handle(TeamOf* team) { return reinterpret_cast<uint64_t*>(team); }
TeamOf& team_of(uint64_t* team) {
    if (team == nullptr) misused("an invalid team");
    return *reinterpret_cast<TeamOf*>(team);
}

}  // namespace

namespace rocshmem {

#if ROCSHMEM_MOCK_VERSION < 30300
rocshmem_team_t ROCSHMEM_TEAM_WORLD = handle(&everybody);
#else
rocshmem_team_t host::ROCSHMEM_TEAM_WORLD = handle(&everybody);
#endif

#if ROCSHMEM_MOCK_VERSION < 30100
void rocshmem_init(MPI_Comm) {  // mpirun is played by torchrun's variables
    auto number = [](const char* name) { return std::atoi(std::getenv(name)); };
    start(number("RANK"), number("WORLD_SIZE"), std::getenv("ROCSHMEM_MOCK_JOB"));
}
#else
void rocshmem_init() { misused("plays no MPI"); }
#endif
void rocshmem_finalize() { rocshmem_barrier_all(); }  // as MPI's, it is over when all have come
int rocshmem_my_pe() { return me; }
int rocshmem_n_pes() { return world; }

#if ROCSHMEM_MOCK_VERSION >= 30000
int rocshmem_get_uniqueid(rocshmem_uniqueid_t* uid) {
    static int count = 0;
    uid->fill(0);
    std::string name = "/rocshmem-mock-" + std::to_string(getpid()) + "-" + std::to_string(++count);
    std::copy(name.begin(), name.end(), uid->begin());
    return 0;
}
int rocshmem_set_attr_uniqueid_args(int rank, int nranks, rocshmem_uniqueid_t* uid,
                                    rocshmem_init_attr_t* attr) {
    *attr = {rank, nranks, *uid, nullptr};
    return 0;
}
int rocshmem_init_attr(unsigned flags, rocshmem_init_attr_t* attr) {
    if (flags != ROCSHMEM_INIT_WITH_UNIQUEID || attr->uid[127] != 0 || attr->uid[0] != '/') return 1;
    start(attr->rank, attr->nranks, reinterpret_cast<const char*>(attr->uid.data()));
    return 0;
}
#endif

namespace {
void* take(size_t size, size_t alignment) {
    agree(everybody, {1, size, alignment});
    uint64_t at = 0;
    for (auto& [begin, bytes] : used) {
        at = up(at, alignment);
        if (at + size <= begin) break;
        at = std::max(at, begin + bytes);
    }
    at = up(at, alignment);
    if (size > heap_bytes || at > heap_bytes - size) return nullptr;
    used[at] = size;
    return heap_of(me) + at;
}
}  // namespace

void* rocshmem_malloc(size_t size) { return take(size, 16); }
#if ROCSHMEM_MOCK_VERSION >= 30400
void* rocshmem_align(size_t alignment, size_t size) { return take(size, alignment); }
#endif
void rocshmem_free(void* ptr) {
    auto at = uint64_t(static_cast<char*>(ptr) - heap_of(me));
    agree(everybody, {2, at});
    if (used.erase(at) != 1) misused("frees what was not allocated");
}
void rocshmem_barrier_all() { meet(shared->on_host, everybody.host_meetings, everybody.pes.size()); }

int rocshmem_team_split_strided(rocshmem_team_t parent, int first, int stride, int size,
                                const rocshmem_team_config_t*, long, rocshmem_team_t* team) {
    TeamOf& whole = team_of(parent);
    auto number = [](int i) { return uint64_t(i); };
    agree(whole, {3, number(first), number(stride), number(size)});
    if (whole.rank == 0) shared->said[me][3] = uint64_t(++shared->teams);
    meet_on_device(whole);
    int id = int(shared->said[whole.pes[0]][3]);
    meet_on_device(whole);
    *team = ROCSHMEM_TEAM_INVALID;
    if (id >= kMostTeams) return 1;
    auto made = new TeamOf;
    made->id = id, made->rank = -1;
    for (int i = 0; i < size; ++i) {
        made->pes.push_back(whole.pes[size_t(first + i * stride)]);
        if (made->pes.back() == me) made->rank = i;
    }
    if (made->rank >= 0) *team = handle(made);
    return 0;
}

#if ROCSHMEM_MOCK_VERSION >= 30100
void* rocshmem_ptr(const void* dest, int pe) { return there(dest, 0, pe); }
#elif ROCSHMEM_MOCK_VERSION >= 30000
void* rocshmem_ptr(void* dest, int pe) { return there(dest, 0, pe); }
#endif

void rocshmem_wg_init() { block.entered = true; }
void rocshmem_wg_finalize() { block.entered = false; }
void rocshmem_quiet() { deliver(); }
void rocshmem_fence() { deliver(); }

namespace {
void put(void* dest, const void* source, size_t bytes, int pe, bool now) {
    auto from = static_cast<const char*>(source);
    Waiting w{there(dest, bytes, pe), const_cast<char*>(from), {}, bytes};
    if (now) w.bytes.assign(from, from + bytes);  // the source may change, but it is not there yet
    std::lock_guard lock(mutex);
    waiting.push_back(std::move(w));
}
void put_signal(void* dest, const void* source, size_t bytes, uint64_t* sig_addr, uint64_t signal, int op,
                int pe) {
    if (bytes == 0) misused("puts nothing with a signal");  // AMD's documentation does not say what happens
    std::memcpy(there(dest, bytes, pe), source, bytes);
    if (op == ROCSHMEM_SIGNAL_SET) word(sig_addr, pe).store(signal);
    if (op == ROCSHMEM_SIGNAL_ADD) word(sig_addr, pe).fetch_add(signal);
}
void wait_for(uint64_t* ivars, int cmp, uint64_t value) {
    until([&] { return compares(word(ivars, me).load(), cmp, value); });
}
void barrier(TeamOf& team) {
    deliver();
    meet_on_device(team);
}
}  // namespace

void rocshmem_putmem_wg(void* dest, const void* source, size_t bytes, int pe) {
    if (whole_group()) put(dest, source, bytes, pe, true);
}
void rocshmem_putmem_nbi_wg(void* dest, const void* source, size_t bytes, int pe) {
    if (whole_group()) put(dest, source, bytes, pe, false);
}
void rocshmem_getmem_wg(void* dest, const void* source, size_t bytes, int pe) {
    if (whole_group()) std::memcpy(dest, there(source, bytes, pe), bytes);
}
void rocshmem_getmem_nbi_wg(void* dest, const void* source, size_t bytes, int pe) {
    if (!whole_group()) return;
    std::lock_guard lock(mutex);
    waiting.push_back({static_cast<char*>(dest), there(source, bytes, pe), {}, bytes});
}
void rocshmem_putmem_signal_wg(void* dest, const void* source, size_t bytes, uint64_t* sig_addr,
                               uint64_t signal, int sig_op, int pe) {
    if (whole_group()) put_signal(dest, source, bytes, sig_addr, signal, sig_op, pe);
}
void rocshmem_uint64_wait_until(uint64_t* ivars, int cmp, uint64_t value) {
    needs_group();
    wait_for(ivars, cmp, value);
}
void rocshmem_uint64_atomic_set(uint64_t* dest, uint64_t value, int pe) { word(dest, pe).store(value); }
void rocshmem_uint64_atomic_add(uint64_t* dest, uint64_t value, int pe) { word(dest, pe).fetch_add(value); }
uint64_t rocshmem_uint64_atomic_fetch_add(uint64_t* dest, uint64_t value, int pe) {
    return word(dest, pe).fetch_add(value);
}
uint64_t rocshmem_uint64_atomic_compare_swap(uint64_t* dest, uint64_t cond, uint64_t value, int pe) {
    word(dest, pe).compare_exchange_strong(cond, value);
    return cond;
}
#if ROCSHMEM_MOCK_VERSION >= 30000
void rocshmem_barrier_all_wg() {
    if (whole_group()) barrier(everybody);
}
void rocshmem_ctx_barrier_wg(rocshmem_ctx_t, rocshmem_team_t team) {
    if (whole_group()) barrier(team_of(team));
}
#else
void rocshmem_wg_barrier_all() {
    if (whole_group()) barrier(everybody);
}
void rocshmem_ctx_wg_team_sync(rocshmem_ctx_t, rocshmem_team_t team) {
    if (whole_group()) meet_on_device(team_of(team));  // and delivers nothing
}
#endif
#if ROCSHMEM_MOCK_VERSION >= 30300
void rocshmem_barrier_wg(rocshmem_team_t team) { rocshmem_ctx_barrier_wg({}, team); }

void rocshmem_quiet_on_stream(hipStream_t stream) { mock_hip::add(stream, deliver); }
void rocshmem_barrier_all_on_stream(hipStream_t stream) {
    mock_hip::add(stream, [] { barrier(everybody); });
}
void rocshmem_putmem_on_stream(void* dest, const void* source, size_t bytes, int pe, hipStream_t stream) {
    mock_hip::add(stream, [=] { put(dest, source, bytes, pe, true); });
}
void rocshmem_getmem_on_stream(void* dest, const void* source, size_t bytes, int pe, hipStream_t stream) {
    mock_hip::add(stream, [=] { std::memcpy(dest, there(source, bytes, pe), bytes); });
}
void rocshmem_putmem_signal_on_stream(void* dest, const void* source, size_t bytes, uint64_t* sig_addr,
                                      uint64_t signal, int sig_op, int pe, hipStream_t stream) {
    mock_hip::add(stream, [=] { put_signal(dest, source, bytes, sig_addr, signal, sig_op, pe); });
}
void rocshmem_signal_wait_until_on_stream(uint64_t* sig_addr, int cmp, uint64_t value, hipStream_t stream) {
    mock_hip::add(stream, [=] { wait_for(sig_addr, cmp, value); });
}
#endif
#if ROCSHMEM_MOCK_VERSION >= 30500
void rocshmem_barrier_on_stream(rocshmem_team_t team, hipStream_t stream) {
    mock_hip::add(stream, [=] { barrier(team_of(team)); });
}
#endif

}  // namespace rocshmem
