// Memory: allocation, registration, windows, one-sided operations. And the reductions of a caller's own.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "group.hpp"
#include "operations.hpp"

namespace mock_nccl {
namespace {

enum Queue : int { kOneSided = 10, kSignalWait = 11 };

std::mutex& allocations_mutex() {
    static std::mutex* m = new std::mutex;
    return *m;
}
struct Allocation {
    size_t size;
    int fd;  // by which other processes map it
};
std::map<void*, Allocation>& allocations() {
    static auto* a = new std::map<void*, Allocation>;
    return *a;
}

// Which allocation has all of this memory: its file, and the place in it. -1: none.
std::pair<int, uint64_t> file_of(void* memory, size_t size) {
    std::lock_guard lock(allocations_mutex());
    auto after = allocations().upper_bound(memory);
    if (after == allocations().begin()) return {-1, 0};
    auto [begin, allocation] = *std::prev(after);
    uint64_t at = static_cast<char*>(memory) - static_cast<char*>(begin);
    bool inside = at <= allocation.size && size <= allocation.size - at;
    return inside ? std::pair(allocation.fd, at) : std::pair(-1, uint64_t(0));
}

// What other ranks have registered, as memory of this process.
struct Reached {
    std::vector<char*> places;
    std::vector<size_t> sizes;
    std::vector<std::pair<void*, size_t>> mapped;

    // `pid` 0: out of reach.
    void add(int pid, int fd, uint64_t address, uint64_t at, size_t size) {
        sizes.push_back(size);
        char* place = pid == getpid() ? reinterpret_cast<char*>(address) : nullptr;
        if (pid != 0 && pid != getpid() && fd >= 0) {
            std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
            int own = open(path.c_str(), O_RDWR | O_CLOEXEC);
            void* whole =
                own < 0 ? MAP_FAILED : mmap(nullptr, at + size, PROT_READ | PROT_WRITE, MAP_SHARED, own, 0);
            if (own >= 0) close(own);
            if (whole != MAP_FAILED) {
                mapped.emplace_back(whole, at + size);
                place = static_cast<char*>(whole) + at;
            }
        }
        places.push_back(place);
    }
    ~Reached() {
        for (auto [whole, size] : mapped) munmap(whole, size);
    }
};

// Windows by their handles, of all communicators, for the calls that take nothing else.
std::mutex& windows_mutex() {
    static std::mutex* m = new std::mutex;
    return *m;
}
std::map<WindowHandle, std::shared_ptr<Reached>>& reached() {
    static auto* r = new std::map<WindowHandle, std::shared_ptr<Reached>>;
    return *r;
}

// How many neighbours can address each other's memory: NCCL_MOCK_LSA, by default all.
bool same_domain(int a, int b) {
    const char* size = environment("NCCL_MOCK_LSA");
    return !size || a / atoi(size) == b / atoi(size);
}

struct Put : Operation {
    Put(CommPtr c, const char* function, int dtype, size_t count, int to)
        : Operation(std::move(c), function, dtype, -1, -1, count), peer(to) {
        queue = {kOneSided, to, true};
    }
    int peer, pid = 0, signal = 0;
    const void* from = nullptr;
    uint64_t to = 0;
    size_t bytes = 0;

    bool step() override {
        done = true;
        size_t written = 0;
        while (pid != getpid() && written < bytes) {
            iovec local{const_cast<char*>(static_cast<const char*>(from)) + written, bytes - written};
            iovec remote{reinterpret_cast<void*>(to + written), bytes - written};
            ssize_t n = process_vm_writev(pid, &local, 1, &remote, 1, 0);
            if (n <= 0) {
                set_last_error(comm,
                               std::string("put into rank ") + std::to_string(peer) + ": " + strerror(errno));
                comm->state = kRemoteError;
                return true;
            }
            written += n;
        }
        if (pid == getpid() && bytes) memmove(reinterpret_cast<void*>(to), from, bytes);
        comm->segment->signals(peer, comm->rank, signal).fetch_add(1);
        comm->segment->ring(peer);
        return true;
    }
};

struct SignalWait : Operation {
    std::vector<WaitSignalDesc> wanted;
    explicit SignalWait(CommPtr c) : Operation(std::move(c), "ncclWaitSignal", -1, -1, -1, 0) {
        queue = {kSignalWait, 0, false};
    }
    bool step() override {
        for (const WaitSignalDesc& d : wanted)
            if (comm->segment->signals(comm->rank, d.peer, d.sigIdx).load() <
                comm->awaited[d.peer][d.sigIdx] + d.opCnt)
                return false;
        for (const WaitSignalDesc& d : wanted) comm->awaited[d.peer][d.sigIdx] += d.opCnt;
        return done = true;
    }
};

const bool told = [] {
    is_library_memory = [](const void* address) { return file_of(const_cast<void*>(address), 1).first >= 0; };
    return true;
}();

}  // namespace

}  // namespace mock_nccl

using namespace mock_nccl;

EXPORT Result ncclRedOpCreatePreMulSum(int* op, void* scalar, int dtype, int residence, CommHandle handle) {
    Call call("ncclRedOpCreatePreMulSum");
    call.dtype = dtype;
    call.extra += ",\"residence\":" + std::to_string(residence);
    if (!call.find_ready(handle) || !known_type(call, dtype)) return failed(call.error);
    if (!op || !scalar) return failed(call.fail(kInvalidArgument, op ? "scalar is NULL" : "op is NULL"));
    if (residence != kScalarDevice && residence != kScalarHost)
        return failed(call.fail(kInvalidArgument, "no residence " + std::to_string(residence)));
    OwnReduction own{{}, dtype, residence == kScalarDevice ? scalar : nullptr};
    own.reduction.pre_multiply = true;
    if (residence == kScalarHost) memcpy(own.reduction.scalar, scalar, size_of(dtype));
    // Numbers of different communicators differ, so that one in the wrong place is found.
    static std::atomic<int> next{kFirstOwnOp};
    std::lock_guard lock(call.comm->mutex);
    *op = next++;
    call.comm->reductions[*op] = own;
    call.op = *op;
    return call.done();
}

EXPORT Result ncclRedOpDestroy(int op, CommHandle handle) {
    Call call("ncclRedOpDestroy");
    call.op = op;
    if (!call.find(handle)) return call.error;
    std::lock_guard lock(call.comm->mutex);
    if (op >= 0 && op < kFirstOwnOp) return call.done(kInvalidArgument);
    return call.done(call.comm->reductions.erase(op) ? kSuccess : kInvalidArgument);
}

EXPORT Result ncclMemAlloc(void** memory, size_t size) {
    Call call("ncclMemAlloc");
    call.count = static_cast<long long>(size);
    if (!memory || !size) return call.fail(kInvalidArgument, memory ? "a size of 0" : "the place is NULL");
    *memory = nullptr;
    int fd = memfd_create("nccl-mock", MFD_CLOEXEC);
    bool good = fd >= 0 && ftruncate(fd, static_cast<off_t>(size)) == 0;
    void* place = good ? mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (place == MAP_FAILED) {
        if (fd >= 0) close(fd);
        return call.fail(kUnhandledCudaError, "out of memory");
    }
    std::lock_guard lock(allocations_mutex());
    allocations()[*memory = place] = {size, fd};
    return call.done();
}

EXPORT Result ncclMemFree(void* memory) {
    Call call("ncclMemFree");
    if (!memory) return call.done();
    std::lock_guard lock(allocations_mutex());
    auto found = allocations().find(memory);
    if (found == allocations().end()) return call.fail(kInvalidUsage, "not memory of ncclMemAlloc");
    munmap(memory, found->second.size);
    close(found->second.fd);
    allocations().erase(found);
    return call.done();
}

EXPORT Result ncclCommRegister(CommHandle handle, void* memory, size_t size, void** registration) {
    Call call("ncclCommRegister");
    call.count = static_cast<long long>(size);
    if (!call.find_ready(handle)) return failed(call.error);
    if (!memory || !size || !registration) return failed(call.fail(kInvalidArgument, "nothing to register"));
    *registration = reserve_handle();
    std::lock_guard lock(call.comm->mutex);
    call.comm->registered[*registration] = size;
    return call.done();
}

EXPORT Result ncclCommDeregister(CommHandle handle, void* registration) {
    Call call("ncclCommDeregister");
    if (!call.find(handle)) return failed(call.error);
    std::lock_guard lock(call.comm->mutex);
    if (!call.comm->registered.erase(registration)) return call.done(kInvalidArgument);
    return call.done();
}

// Collective; all memory can be a window, that of MemAlloc or not.
EXPORT Result ncclCommWindowRegister(CommHandle handle, void* memory, size_t size, WindowHandle* window,
                                     int flags) {
    Call call("ncclCommWindowRegister");
    call.count = static_cast<long long>(size);
    call.extra += ",\"flags\":" + std::to_string(flags);
    if (!call.find_ready(handle)) return failed(call.error);
    CommPtr comm = call.comm;
    if (!memory || !size || !window) return failed(call.fail(kInvalidArgument, "nothing to register"));
    if (reinterpret_cast<uint64_t>(memory) % kWindowAlignment)
        return failed(call.fail(kInvalidArgument, "a window begins at a multiple of 4096 bytes"));
    if (flags < 0 || flags > 15) return failed(call.fail(kInvalidArgument, "unknown window flags"));
    *window = nullptr;
    auto work = [comm, memory, size, window] {
        struct Part {
            int pid, fd;
            uint64_t address, size, at;
        };
        Part mine;
        memset(&mine, 0, sizeof mine);
        auto [fd, at] = file_of(memory, size);
        mine = {getpid(), fd, reinterpret_cast<uint64_t>(memory), size, at};
        prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);  // peers write into this process
        std::vector<Part> all(comm->nranks);
        if (!comm->exchange(&mine, sizeof mine, all.data())) return kInternalError;
        auto peers = std::make_shared<Reached>();
        Window w{0, memory, {}, {}, {}};
        for (const Part& p : all) {
            bool near = same_domain(int(w.pids.size()), comm->rank);
            peers->add(near ? p.pid : 0, p.fd, p.address, p.at, p.size);
            w.pids.push_back(p.pid);
            w.addresses.push_back(p.address);
            w.sizes.push_back(p.size);
        }
        // Nobody gives its memory back before all have mapped it.
        std::vector<char> done(comm->nranks);
        if (!comm->exchange("", 1, done.data())) return kInternalError;
        std::lock_guard lock(comm->mutex);
        w.index = comm->next_window++;
        *window = reserve_handle();
        comm->windows[*window] = std::move(w);
        std::lock_guard known(windows_mutex());
        reached()[*window] = peers;
        return kSuccess;
    };
    return perform(call, comm, comm->settings.blocking(), work, false);
}

EXPORT Result ncclCommWindowDeregister(CommHandle handle, WindowHandle window) {
    Call call("ncclCommWindowDeregister");
    if (!call.find(handle)) return failed(call.error);
    std::lock_guard lock(call.comm->mutex);
    if (!call.comm->windows.erase(window)) return call.done(kInvalidArgument);
    std::lock_guard known(windows_mutex());
    reached().erase(window);
    return call.done();
}

// Null, and no error, where that rank's memory cannot be addressed.
EXPORT Result ncclGetPeerDevicePointer(WindowHandle window, size_t offset, int peer, void** pointer) {
    Call call("ncclGetPeerDevicePointer");
    call.peer = peer;
    std::lock_guard lock(windows_mutex());
    auto found = reached().find(window);
    if (found == reached().end() || !pointer)
        return call.fail(kInvalidArgument, "no such window, or no place");
    const Reached& r = *found->second;
    if (peer < 0 || peer >= int(r.places.size()) || offset > r.sizes[peer])
        return call.fail(kInvalidArgument, "no such rank, or an offset beyond its window");
    *pointer = r.places[peer] ? r.places[peer] + offset : nullptr;
    return call.done();
}

namespace {

// Whether all of this memory is in one of the communicator's windows.
bool in_window(Comm& comm, const void* memory, size_t bytes) {
    std::lock_guard lock(comm.mutex);
    for (auto& [handle, w] : comm.windows) {
        uint64_t at = static_cast<const char*>(memory) - static_cast<const char*>(w.base);
        uint64_t size = w.sizes[comm.rank];
        if (at <= size && bytes <= size - at) return true;
    }
    return false;
}

bool find_window(Call& call, WindowHandle handle, Window* window) {
    std::lock_guard lock(call.comm->mutex);
    auto found = call.comm->windows.find(handle);
    if (found == call.comm->windows.end()) return false;
    *window = found->second;
    return true;
}

// Since 2.31 a communicator has as many indices as its config says; one where that does not.
bool known_signal(Call& call, int signal, int context, unsigned flags) {
    int set = call.comm->settings.fields.numRmaSig;
    int count = version() < 23100 || set == kUndefined ? 1 : std::min(set, kSignals);
    if (signal >= 0 && signal < count && context == 0 && flags == 0) return true;
    call.error = call.fail(kInvalidArgument, "signal index " + std::to_string(signal) + " of " +
                                                 std::to_string(count) + "; context and flags must be 0");
    return false;
}

}  // namespace

EXPORT Result ncclWinGetUserPtr(CommHandle handle, WindowHandle window, void** memory) {
    Call call("ncclWinGetUserPtr");
    Window w;
    if (!call.find(handle)) return call.error;
    if (!memory || !find_window(call, window, &w)) return call.fail(kInvalidArgument, "no such window");
    *memory = w.base;
    return call.done();
}

EXPORT Result ncclPutSignal(const void* data, size_t count, int dtype, int peer, WindowHandle window,
                            size_t offset, int signal, int context, unsigned flags, CommHandle handle,
                            StreamHandle stream) {
    Call call = begin("ncclPutSignal", data, nullptr, count, dtype, stream);
    call.peer = peer;
    call.extra += ",\"offset\":" + std::to_string(offset);
    if (!usable(call, handle) || !known_rank(call, peer, "peer") || !known_type(call, dtype) ||
        !known_signal(call, signal, context, flags))
        return failed(call.error);
    Window w;
    if (!find_window(call, window, &w)) return failed(call.fail(kInvalidArgument, "no such window"));
    size_t bytes = count * size_of(dtype);
    if (offset > w.sizes[peer] || bytes > w.sizes[peer] - offset)
        return failed(call.fail(kInvalidArgument, "the put does not fit into the peer's window"));
    if (!data && count) return failed(call.fail(kInvalidArgument, "the local buffer is NULL"));
    if (!in_window(*call.comm, data, bytes))
        return failed(call.fail(kInvalidArgument, "srcWinHost is not in a valid symmetric window"));
    auto put = std::make_unique<Put>(call.comm, call.function, dtype, count, peer);
    put->pid = w.pids[peer], put->from = data, put->to = w.addresses[peer] + offset, put->bytes = bytes;
    put->signal = signal;
    return submit(call, std::move(put));
}

EXPORT Result ncclSignal(int peer, int signal, int context, unsigned flags, CommHandle handle,
                         StreamHandle stream) {
    Call call = begin("ncclSignal", nullptr, nullptr, 0, -1, stream);
    call.peer = peer;
    if (!usable(call, handle) || !known_rank(call, peer, "peer") ||
        !known_signal(call, signal, context, flags))
        return failed(call.error);
    auto put = std::make_unique<Put>(call.comm, call.function, -1, 0, peer);
    put->pid = getpid(), put->signal = signal;
    return submit(call, std::move(put));
}

EXPORT Result ncclWaitSignal(int n, WaitSignalDesc* wanted, CommHandle handle, StreamHandle stream) {
    Call call = begin("ncclWaitSignal", nullptr, nullptr, n, -1, stream);
    if (!usable(call, handle)) return failed(call.error);
    if (n < 0 || (n && !wanted)) return failed(call.fail(kInvalidArgument, "no descriptors"));
    auto wait = std::make_unique<SignalWait>(call.comm);
    for (int i = 0; i < n; ++i) {
        if (!known_rank(call, wanted[i].peer, "peer") ||
            !known_signal(call, wanted[i].sigIdx, wanted[i].ctx, 0))
            return failed(call.error);
        if (wanted[i].opCnt < 1) return failed(call.fail(kInvalidArgument, "a count of signals below 1"));
        wait->wanted.push_back(wanted[i]);
    }
    return submit(call, std::move(wait));
}
