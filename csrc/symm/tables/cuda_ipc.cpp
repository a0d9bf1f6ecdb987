// The table over device memory. Each PE has one piece of device memory, which the others open by its IPC
// handle. Beside it is a host heap of the same size whose pages are never touched: its table agrees on
// allocations, meets, and notices dead PEs, and an offset in it is the offset on the devices.
//
// Copies are those of the runtime, in the order of their stream. The host waits only for what the PEs do
// together: allocations, teams and the barrier. There are no signals and no atomics: these need kernels
// (unicomm/symm/kernels), which the host cannot launch without the device's compiler.
//
// HIP's runtime has the same functions under its own prefix.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/dynamic_library.hpp"
#include "symm/table_error.hpp"
#include "symm/tables/tables.hpp"

namespace unicomm::symm {
namespace {

constexpr uint64_t kPage = 4096;
// What a handle opens for the other PEs. A smaller piece would share its page with other allocations, which
// they would get as well.
constexpr uint64_t kShared = uint64_t{2} << 20;
constexpr uint64_t kDefaultHeap = uint64_t{1} << 28;  // device memory is allocated from the beginning
constexpr int kCopyDefault = 4;                       // cudaMemcpyDefault: by the addresses
constexpr int kAlreadyEnabled = 704;                  // cudaErrorPeerAccessAlreadyEnabled
constexpr unsigned kLazyPeerAccess = 1;               // cudaIpcMemLazyEnablePeerAccess
constexpr int kRelaxed = 2;                           // cudaStreamCaptureModeRelaxed
// hipDeviceMallocFinegrained: AMD devices see each other's flags only in such memory.
constexpr unsigned kFineGrained = 1;

struct IpcHandle {  // cudaIpcMemHandle_t
    char bytes[64];
};

#define UNICOMM_CUDART_FUNCTIONS(X)                                  \
    X(Free, int(void*))                                              \
    X(MemcpyAsync, int(void*, const void*, size_t, int kind, void*)) \
    X(StreamSynchronize, int(void*))                                 \
    X(GetDevice, int(int*))                                          \
    X(SetDevice, int(int))                                           \
    X(GetLastError, int())                                           \
    X(ThreadExchangeStreamCaptureMode, int(int*))                    \
    X(DeviceEnablePeerAccess, int(int device, unsigned flags))       \
    X(IpcGetMemHandle, int(IpcHandle*, void*))                       \
    X(IpcOpenMemHandle, int(void**, IpcHandle, unsigned flags))      \
    X(IpcCloseMemHandle, int(void*))                                 \
    X(GetErrorString, const char*(int))

struct Cudart {
#define UNICOMM_CUDART_MEMBER(name, ...) std::type_identity_t<__VA_ARGS__>* name = nullptr;
    UNICOMM_CUDART_FUNCTIONS(UNICOMM_CUDART_MEMBER)
#undef UNICOMM_CUDART_MEMBER

    std::string path, prefix;
    int (*Malloc)(void**, size_t) = nullptr;                        // CUDA's
    int (*ExtMallocWithFlags)(void**, size_t, unsigned) = nullptr;  // HIP's

    Cudart(const std::string& path, const std::string& prefix) : path(path), prefix(prefix) {
        void* handle = open_library(path);
        auto find = [&](const std::string& name) {
            void* found = dlsym(handle, (prefix + name).c_str());
            if (found == nullptr)
                throw SystemFailure(path + " is no runtime of this device: it has no " + prefix + name);
            return found;
        };
#define UNICOMM_CUDART_FIND(name, ...) \
    this->name = reinterpret_cast<std::type_identity_t<__VA_ARGS__>*>(find(#name));
        UNICOMM_CUDART_FUNCTIONS(UNICOMM_CUDART_FIND)
#undef UNICOMM_CUDART_FIND
        if (prefix == "hip") {
            ExtMallocWithFlags = reinterpret_cast<decltype(ExtMallocWithFlags)>(find("ExtMallocWithFlags"));
        } else {
            Malloc = reinterpret_cast<decltype(Malloc)>(find("Malloc"));
        }
    }

    int allocate(void** out, size_t bytes) const {
        return Malloc ? Malloc(out, bytes) : ExtMallocWithFlags(out, bytes, kFineGrained);
    }
};
const Cudart* cudart = nullptr;  // set once, by cuda_ipc_table: a process has one kind of device

// Whether a call succeeded. Clears the runtime's last error, which the program would find: torch checks it
// after each kernel.
bool fine(int result) {
    if (result != 0) cudart->GetLastError();
    return result == 0;
}

int checked(int result, const char* what, Error* error) {
    if (fine(result)) return 0;
    return report(cudart->prefix + what + ": " + cudart->GetErrorString(result), error);
}

// Makes `device` the current device of this thread, and keeps its calls from ending a graph capture: memory
// may be freed at any time.
class OnDevice {
  public:
    explicit OnDevice(int device) {
        changed_ = fine(cudart->GetDevice(&before_)) && before_ != device && fine(cudart->SetDevice(device));
        relaxed_ = fine(cudart->ThreadExchangeStreamCaptureMode(&mode_));
    }
    ~OnDevice() {
        if (relaxed_) fine(cudart->ThreadExchangeStreamCaptureMode(&mode_));
        if (changed_) fine(cudart->SetDevice(before_));
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

  private:
    int before_ = 0, mode_ = kRelaxed;
    bool changed_ = false, relaxed_ = false;
};

// What a PE publishes in the first page of its part of the host heap.
struct Offer {
    IpcHandle handle;
    void* address;  // for PEs that are threads of the same process
    int32_t pid, device;
    std::atomic<int32_t> closed;  // number of other PEs that have closed it
};

// Memory that must not be freed yet, because other PEs still have it open. It is checked again when another
// heap is created or released.
struct Kept {
    std::shared_ptr<void> host;
    Offer* own;
    char* base;
    int others;
};

void keep_or_free(std::vector<Kept> more) {
    static std::mutex mutex;
    static auto* kept = new std::vector<Kept>;  // never destroyed: the runtime may be gone by then
    std::lock_guard lock(mutex);
    kept->insert(kept->end(), more.begin(), more.end());
    std::erase_if(*kept, [](const Kept& k) {
        if (k.own->closed.load() < k.others) return false;
        OnDevice here(k.own->device);
        fine(cudart->Free(k.base));
        return true;
    });
}

// The memory of all devices, which teams share.
struct Devices {
    int rank = 0, pid = 0;
    uint64_t bytes = 0;
    Offer* own = nullptr;
    std::vector<Offer*> offers;
    std::vector<char*> bases;    // null: not opened
    std::shared_ptr<void> host;  // keeps the offers alive

    // A forked child has no device.
    ~Devices() {
        if (pid != int(getpid()) || own == nullptr) return;
        OnDevice here(own->device);
        int others = 0;
        for (size_t pe = 0; pe < bases.size(); ++pe) {
            if (int(pe) == rank || offers[pe] == nullptr) continue;
            ++others;
            if (bases[pe] != nullptr && offers[pe]->pid != pid) fine(cudart->IpcCloseMemHandle(bases[pe]));
            offers[pe]->closed.fetch_add(1);
        }
        if (bases[size_t(rank)] != nullptr) {
            keep_or_free({{host, own, bases[size_t(rank)], others}});
        }
    }
};

struct Ipc {
    std::shared_ptr<void> host;  // the domain of the host's table
    char* host_base = nullptr;
    std::shared_ptr<Devices> devices;
    std::vector<int> pes;  // PE of the heap, by PE of this domain

    char* mine() const { return devices->bases[size_t(devices->rank)]; }
};

const Vtbl& host() { return host_table(); }
Ipc& ipc_of(Domain domain) { return *static_cast<Ipc*>(domain); }

std::shared_ptr<void> held(Domain domain) {
    return {domain, [](Domain d) {
                Error error{};
                host().release(d, &error);
            }};
}

// The address on `pe` of what this PE has at `address`; null if not all of it is in the heap.
char* there(Ipc& ipc, const void* address, uint64_t bytes, int pe, Error* error, int& code) {
    auto at = uint64_t(static_cast<const char*>(address) - ipc.mine());
    bool good =
        pe >= 0 && pe < int(ipc.pes.size()) && at <= ipc.devices->bytes && bytes <= ipc.devices->bytes - at;
    code = good ? 0 : report("outside of the symmetric heap, or no such PE", error);
    return good ? ipc.devices->bases[size_t(ipc.pes[size_t(pe)])] + at : nullptr;
}

uint64_t* size_in(UniqueId* id) { return reinterpret_cast<uint64_t*>(id->bytes + sizeof id->bytes) - 1; }

int unique_id(int world, uint64_t heap_bytes, UniqueId* out, Error* error) {
    keep_or_free({});
    uint64_t part = ((heap_bytes ? heap_bytes : kDefaultHeap) + kPage - 1) / kPage * kPage + kPage;
    int code = host().unique_id(world, part, out, error);
    if (code == 0 && *size_in(out) != 0) return report("the host's id has no room for another number", error);
    if (code == 0) *size_in(out) = part;
    return code;
}

int discard_id(const UniqueId* id, Error* error) { return host().discard_id(id, error); }

// For PEs that are threads of one process, each with its own device.
bool enabled(int device) {
    int result = cudart->DeviceEnablePeerAccess(device, 0);
    return fine(result) || result == kAlreadyEnabled;
}

int open_all(Ipc& ipc, int world, Error* error) {
    Devices& d = *ipc.devices;
    for (int pe = 0; pe < world; ++pe) {
        void* place = nullptr;
        if (int code = host().ptr(ipc.host.get(), ipc.host_base, sizeof(Offer), pe, &place, error))
            return code;
        d.offers[size_t(pe)] = static_cast<Offer*>(place);
    }
    for (int pe = 0; pe < world; ++pe) {
        Offer& offer = *d.offers[size_t(pe)];
        void* base = offer.address;
        bool open = offer.pid != d.pid ? fine(cudart->IpcOpenMemHandle(&base, offer.handle, kLazyPeerAccess))
                                       : offer.device == d.own->device || enabled(offer.device);
        if (!open) {
            return report("cannot open the device memory of PE " + std::to_string(pe) + " (device " +
                              std::to_string(offer.device) + "): the devices have to reach each other",
                          error);
        }
        d.bases[size_t(pe)] = static_cast<char*>(base);
    }
    return 0;
}

int init(const UniqueId* uid, int rank, int world, const char* name, uint64_t deadline, Domain* out,
         Error* error) {
    keep_or_free({});
    UniqueId id = *uid;
    uint64_t part = *size_in(&id);
    *size_in(&id) = 0;
    Domain domain = nullptr;
    if (int code = host().init(&id, rank, world, name, deadline, &domain, error)) return code;
    auto ipc = std::make_unique<Ipc>();
    ipc->host = held(domain);
    void* first = nullptr;
    if (int code = host().allocate(domain, kPage, kPage, deadline, &first, error)) return code;
    ipc->host_base = static_cast<char*>(first);
    auto devices = ipc->devices = std::make_shared<Devices>();
    devices->rank = rank, devices->pid = int(getpid()), devices->bytes = part, devices->host = ipc->host;
    devices->offers.resize(size_t(world)), devices->bases.resize(size_t(world));
    for (int pe = 0; pe < world; ++pe) ipc->pes.push_back(pe);
    auto* own = devices->own = new (first) Offer{};
    own->pid = devices->pid;
    void* memory = nullptr;
    int code = checked(cudart->GetDevice(&own->device), "GetDevice", error);
    OnDevice here(own->device);
    uint64_t whole = (part + kShared - 1) / kShared * kShared;
    if (code == 0) code = checked(cudart->allocate(&memory, whole), "Malloc", error);
    devices->bases[size_t(rank)] = static_cast<char*>(own->address = memory);
    if (code == 0) code = checked(cudart->IpcGetMemHandle(&own->handle, memory), "IpcGetMemHandle", error);
    // A PE that fails leaves, and the others learn it at the barrier.
    if (code == 0) code = host().barrier(domain, deadline, nullptr, error);
    if (code == 0) code = open_all(*ipc, world, error);
    if (code == 0) code = host().barrier(domain, deadline, nullptr, error);
    if (code != 0) {
        Error ignored{};
        host().leave(domain, &ignored);
        return code;
    }
    *out = ipc.release();
    return 0;
}

int leave(Domain domain, Error* error) { return host().leave(ipc_of(domain).host.get(), error); }

int release(Domain domain, Error*) {
    delete &ipc_of(domain);
    return 0;
}

int abort_domain(Domain domain, int code, const Error* why, Error* error) {
    return host().abort(ipc_of(domain).host.get(), code, why, error);
}

int allocate(Domain domain, uint64_t bytes, uint64_t align, uint64_t deadline, void** out, Error* error) {
    Ipc& ipc = ipc_of(domain);
    void* place = nullptr;
    int code = host().allocate(ipc.host.get(), bytes, align, deadline, &place, error);
    if (code == 0) *out = ipc.mine() + (static_cast<char*>(place) - ipc.host_base);
    return code;
}

int free_memory(Domain domain, void* address, uint64_t deadline, Error* error) {
    Ipc& ipc = ipc_of(domain);
    char* place = ipc.host_base + (static_cast<char*>(address) - ipc.mine());
    return host().free(ipc.host.get(), place, deadline, error);
}

// Later work of the stream runs after its copies.
int quiet(Domain, Stream, Error*) { return 0; }

// Waits on the host: the runtime cannot synchronize streams of several processes.
int barrier(Domain domain, uint64_t deadline, Stream stream, Error* error) {
    if (int code = checked(cudart->StreamSynchronize(stream), "StreamSynchronize", error)) return code;
    return host().barrier(ipc_of(domain).host.get(), deadline, nullptr, error);
}

int ptr(Domain domain, const void* address, uint64_t bytes, int pe, void** out, Error* error) {
    int code;
    *out = there(ipc_of(domain), address, bytes, pe, error, code);
    return code;
}

int copy(void* to, const void* from, uint64_t bytes, Stream stream, Error* error) {
    return checked(cudart->MemcpyAsync(to, from, bytes, kCopyDefault, stream), "MemcpyAsync", error);
}

int put(Domain domain, void* to, const void* from, uint64_t bytes, int pe, Stream stream, Error* error) {
    int code;
    char* place = there(ipc_of(domain), to, bytes, pe, error, code);
    return place ? copy(place, from, bytes, stream, error) : code;
}

int get(Domain domain, void* to, const void* from, uint64_t bytes, int pe, Stream stream, Error* error) {
    int code;
    char* place = there(ipc_of(domain), from, bytes, pe, error, code);
    return place ? copy(to, place, bytes, stream, error) : code;
}

int team_split(Domain domain, int start, int stride, int size, uint64_t deadline, Domain* out, Error* error) {
    Ipc& ipc = ipc_of(domain);
    *out = nullptr;
    Domain team = nullptr;
    int code = host().team_split(ipc.host.get(), start, stride, size, deadline, &team, error);
    if (code != 0 || team == nullptr) return code;
    auto made = std::make_unique<Ipc>();
    made->host = held(team);
    made->host_base = ipc.host_base;
    made->devices = ipc.devices;
    for (int i = 0; i < size; ++i) made->pes.push_back(ipc.pes[size_t(start + i * stride)]);
    *out = made.release();
    return 0;
}

}  // namespace

const Vtbl& cuda_ipc_table(const std::string& path, const std::string& prefix) {
    // Opened even if a runtime is open already, so that another library is reported as an error.
    auto asked = std::make_unique<Cudart>(path, prefix);
    if (cudart == nullptr) cudart = asked.release();
    if (asked != nullptr && asked->Free != cudart->Free)
        throw SystemFailure(path + " would be this process's second runtime for device memory, after " +
                            cudart->path);
    static const Vtbl table = [] {
        Vtbl t{};
        t.name = cudart->prefix == "hip" ? "HIP IPC" : "CUDA IPC";
        t.unique_id = unique_id, t.discard_id = discard_id, t.init = init, t.leave = leave;
        t.release = release, t.abort = abort_domain, t.allocate = allocate, t.free = free_memory;
        t.barrier = barrier, t.ptr = ptr, t.put = t.put_nbi = put, t.get = t.get_nbi = get;
        t.fence = t.quiet = quiet, t.team_split = team_split;
        t.capabilities = capabilities_of(t);
        return t;
    }();
    return table;
}

}  // namespace unicomm::symm
