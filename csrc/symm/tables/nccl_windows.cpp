// The functions of the table over NCCL windows.
#include "symm/tables/nccl_windows.hpp"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "nccl/unfinished_calls.hpp"
#include "symm/tables/nccl_windows_domain.hpp"

namespace unicomm::symm {
namespace {

using namespace nccl_windows;

constexpr uint64_t kPage = 4096;
constexpr int kByte = 1;     // ncclUint8
constexpr int kMax = 2;      // ncclMax
constexpr int kNoTeam = -1;  // NCCL_SPLIT_NOCOLOR

// The address on `pe` of what this PE has at `address`; null with a code, if not all of it is in the heap or
// this process cannot address it.
char* there(const WindowDomain& self, const void* address, uint64_t bytes, int pe, Error* error, int& code) {
    const Heap& heap = *self.heap;
    auto at = uint64_t(static_cast<const char*>(address) - heap.base);
    code = 0;
    if (pe < 0 || pe >= int(self.ranks.size()) || at > heap.bytes || bytes > heap.bytes - at) {
        code = report(FaultCode::kInternal, "outside of the symmetric heap, or no such PE", error);
        return nullptr;
    }
    char* place = heap.places[size_t(self.ranks[size_t(pe)])];
    if (place == nullptr)
        code = unsupported(
            "the memory of PE " + std::to_string(pe) +
                " cannot be addressed from here: only signals, and what comes with them, get there",
            error);
    return place ? place + at : nullptr;
}

int leave(Domain domain, Error* error) {
    WindowDomain& self = domain_of(domain);
    if (self.ended.exchange(true) || self.heap->pid != int(getpid())) return 0;
    if (self.team) {
        // Ranks of an aborted communicator may be gone.
        auto finish = self.heap->aborted ? self.library().CommAbort : self.library().CommDestroy;
        int result = finish(self.comm);
        return result == nccl::kSuccess ? 0 : failed(self, "CommDestroy", result, error);
    }
    self.heap->left = true;
    int result = self.library().CommWindowDeregister(self.comm, self.heap->window);
    return result == nccl::kSuccess ? 0 : failed(self, "CommWindowDeregister", result, error);
}

int release(Domain domain, Error*) {
    delete &domain_of(domain);
    return 0;
}

// The backend owns and aborts the communicator of the heap; a team owns its own.
int abort_domain(Domain domain, int, const Error*, Error*) {
    WindowDomain& self = domain_of(domain);
    if (self.ended.exchange(true)) return 0;
    if (self.team)
        self.library().CommAbort(self.comm);
    else
        self.heap->aborted = true;
    return 0;
}

int allocate(Domain domain, uint64_t bytes, uint64_t align, uint64_t deadline, void** out, Error* error) {
    WindowDomain& self = domain_of(domain);
    if (self.team)
        return report(FaultCode::kInternal, "memory is allocated by all PEs, not by a team", error);
    if (int code = agree(self, kAllocate, int64_t(bytes), int64_t(align), deadline, error)) return code;
    uint64_t at = 0, whole = (std::max<uint64_t>(bytes, 1) + kLine - 1) / kLine * kLine;
    if (!self.heap->arena.take(whole, std::max(align, kLine), at))
        return report(FaultCode::kInternal,
                      "no room for " + std::to_string(bytes) + " bytes in the symmetric heap", error);
    *out = self.heap->base + at;
    return 0;
}

int free_memory(Domain domain, void* address, uint64_t deadline, Error* error) {
    WindowDomain& self = domain_of(domain);
    Heap& heap = *self.heap;
    auto at = uint64_t(static_cast<char*>(address) - heap.base);
    uint64_t bytes = heap.arena.size(at);
    if (self.team || bytes == 0) return report(FaultCode::kInternal, "nothing was allocated there", error);
    if (int code = agree(self, kFree, int64_t(at), 0, deadline, error)) return code;
    heap.arena.give(at);
    for (auto* counters : {&heap.sent, &heap.awaited}) {
        for (Counter& c : *counters) {
            auto place = uint64_t(reinterpret_cast<const char*>(c.word) - heap.base);
            if (c.word != nullptr && place - at < bytes) c.stale = true;
        }
    }
    return 0;
}

int barrier(Domain domain, uint64_t, Stream stream, Error* error) {
    WindowDomain& self = domain_of(domain);
    if (self.over()) return gone(error);
    char* byte = self.heap->base;
    return checked(self, self.comm, "AllReduce",
                   self.library().AllReduce(byte, byte, 1, kByte, kMax, self.comm, stream), error);
}

int ptr(Domain domain, const void* address, uint64_t bytes, int pe, void** out, Error* error) {
    int code;
    *out = there(domain_of(domain), address, bytes, pe, error, code);
    return code;
}

int put(Domain domain, void* to, const void* from, uint64_t bytes, int pe, Stream stream, Error* error) {
    int code;
    const WindowDomain& self = domain_of(domain);
    char* place = there(self, to, bytes, pe, error, code);
    return place ? copied(self, place, from, bytes, stream, error) : code;
}

int get(Domain domain, void* to, const void* from, uint64_t bytes, int pe, Stream stream, Error* error) {
    int code;
    const WindowDomain& self = domain_of(domain);
    char* place = there(self, from, bytes, pe, error, code);
    return place ? copied(self, to, place, bytes, stream, error) : code;
}

// Later work of a stream runs after its copies.
int in_order(Domain, Stream, Error*) { return 0; }

// Returns the counter that stands for a word, or null with a code if it stands for another word.
Counter* counter(const Heap& heap, Counter& c, const uint64_t* word, Error* error, int& code) {
    auto at = uint64_t(reinterpret_cast<const char*>(word) - heap.base);
    code = 0;
    if (at % sizeof *word != 0 || at > heap.bytes - sizeof *word)
        code = report(FaultCode::kInternal, "the signal is no word of the symmetric heap", error);
    else if (c.word != nullptr && (c.word != word || c.stale))
        code = unsupported(
            "the library has one signal for each pair of ranks, and another word of the heap has it already: "
            "use the same word for all signals between two ranks, and do not free it",
            error);
    else
        c.word = word;
    return code == 0 ? &c : nullptr;
}

int put_signal(Domain domain, void* to, const void* from, uint64_t bytes, uint64_t* signal, uint64_t value,
               SignalOp op, int pe, Stream stream, Error* error) {
    WindowDomain& self = domain_of(domain);
    Heap& heap = *self.heap;
    if (self.over()) return gone(error);
    if (op != SignalOp::kAdd || value != 1)
        return unsupported("the library counts signals: a signal adds 1, and nothing else", error);
    auto at = bytes != 0 ? uint64_t(static_cast<char*>(to) - heap.base) : 0;
    if (pe < 0 || pe >= int(self.ranks.size()) || at > heap.bytes || bytes > heap.bytes - at)
        return report(FaultCode::kInternal, "outside of the symmetric heap, or no such PE", error);
    auto source = uint64_t(static_cast<const char*>(from) - heap.base);
    if (bytes != 0 && (source > heap.bytes || bytes > heap.bytes - source))
        return unsupported("the data that come with a signal must be in the symmetric heap of this PE",
                           error);
    int code, rank = self.ranks[size_t(pe)];
    Counter* c = counter(heap, heap.sent[size_t(rank)], signal, error, code);
    if (c == nullptr) return code;
    const auto& library = self.library();
    int result = bytes != 0 ? library.PutSignal(from, bytes, kByte, rank, heap.window, at, heap.signals, 0, 0,
                                                heap.comm, stream)
                            : library.Signal(rank, heap.signals, 0, 0, heap.comm, stream);
    code = checked(self, heap.comm, bytes != 0 ? "PutSignal" : "Signal", result, error);
    if (code == 0) ++c->count;
    return code;
}

int wait_signal(Domain domain, const uint64_t* signal, Compare compare, uint64_t value, int source, uint64_t,
                Stream stream, Error* error) {
    WindowDomain& self = domain_of(domain);
    Heap& heap = *self.heap;
    if (self.over()) return gone(error);
    if (compare != Compare::kGe && compare != Compare::kGt)
        return unsupported("the library counts signals: a word can be waited for as >= or > a value only",
                           error);
    if (source < 0 || source >= int(self.ranks.size()))
        return unsupported("the library waits for signals of one rank: which one has to be said", error);
    int code, rank = self.ranks[size_t(source)];
    Counter* c = counter(heap, heap.awaited[size_t(rank)], signal, error, code);
    if (c == nullptr) return code;
    uint64_t least = value + (compare == Compare::kGt ? 1 : 0);
    if (least <= c->count) return 0;
    if (least - c->count > INT32_MAX)
        return report(FaultCode::kInternal, "more signals than the library waits for at once", error);
    nccl::WaitSignalDesc wait{int(least - c->count), rank, heap.signals, 0};
    code =
        checked(self, heap.comm, "WaitSignal", self.library().WaitSignal(1, &wait, heap.comm, stream), error);
    if (code == 0) c->count = least;
    return code;
}

// Returns the first PE that names an invalid team, or a team whose members name other teams; -1 if there is
// none. All PEs get the same result.
int misplaced(const Heap& heap) {
    for (int pe = 0; pe < heap.world; ++pe) {
        const int64_t* own = &heap.heard[size_t(pe * kWords)];
        const int64_t start = own[1], stride = own[2], size = own[3];
        bool member = size == 0, good = size >= 0 && size <= heap.world;
        for (int64_t i = 0; good && i < size; ++i) {
            int64_t other = start + i * stride;
            member |= other == pe;
            good = other >= 0 && other < heap.world && (i == 0 || stride != 0) &&
                   std::equal(own, own + kWords, &heap.heard[size_t(other * kWords)]);
        }
        if (!good || !member) return pe;
    }
    return -1;
}

// The library waits for all ranks, without a deadline.
int team_split(Domain domain, int start, int stride, int size, uint64_t deadline, Domain* out, Error* error) {
    WindowDomain& self = domain_of(domain);
    *out = nullptr;
    if (self.team) return unsupported("a team is not split again: split the communicator", error);
    if (int code = meet(self, kSplit, start, stride, size, deadline, error)) return code;
    if (int pe = misplaced(*self.heap); pe >= 0)
        return report(FaultCode::kMismatch,
                      "the team of rank " + std::to_string(pe) + " is none, or its members name others",
                      error, {pe});
    double seconds = deadline > now_ns() ? double(deadline - now_ns()) / 1e9 : 0.0;
    struct Split {
        int color, key;
    };
    Split wish{size != 0 ? start : kNoTeam, size > 1 ? (self.heap->rank - start) / stride : 0};
    auto [result, comm] = nccl::create(
        std::make_unique<nccl::Creation<Split>>(wish), seconds,
        [&](auto& c) {
            return self.library().CommSplit(self.comm, c.inputs.color, c.inputs.key, &c.place, nullptr);
        },
        [&](void*) { return nccl::state_of(self.library(), self.comm); }, nccl::pause_briefly);
    if (result != nccl::kSuccess) return failed(self, "CommSplit", result, error);
    if (size == 0) return 0;
    auto made = std::make_unique<WindowDomain>();
    made->heap = self.heap, made->comm = comm, made->team = true;
    for (int i = 0; i < size; ++i) made->ranks.push_back(start + i * stride);
    *out = made.release();
    return 0;
}

}  // namespace

uint64_t nccl_windows_reserve(int world) {
    uint64_t bytes = 2 * kLine + kWords * sizeof(int64_t) * uint64_t(world);
    return (bytes + kPage - 1) / kPage * kPage;
}

Domain open_nccl_windows(const NcclHeap& made) {
    auto self = std::make_unique<WindowDomain>();
    self->heap = std::make_shared<Heap>(made);
    self->comm = made.comm;
    for (int rank = 0; rank < made.world; ++rank) self->ranks.push_back(rank);
    return self.release();
}

Vtbl nccl_windows_table(const NcclHeap& heap) {
    const nccl::Functions& library = (*heap.library)();
    Vtbl t{};
    t.name = "NCCL windows";
    t.leave = leave, t.release = release, t.abort = abort_domain;
    t.allocate = allocate, t.free = free_memory, t.barrier = barrier;
    if (library.GetPeerDevicePointer != nullptr) {
        t.ptr = ptr, t.put = t.put_nbi = put, t.get = t.get_nbi = get, t.fence = t.quiet = in_order;
    }
    if (heap.signals >= 0) t.put_signal = put_signal, t.wait_signal = wait_signal;
    if (library.CommSplit != nullptr) t.team_split = team_split;
    t.capabilities = capabilities_of(t);
    return t;
}

}  // namespace unicomm::symm
