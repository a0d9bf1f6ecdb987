#include "symm/nccl_windows.hpp"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "nccl/making.hpp"
#include "symm/nccl_windows_end.hpp"

namespace unicomm::symm {
namespace {

using namespace nccl_windows;

constexpr uint64_t kPage = 4096;
constexpr int kByte = 1;     // ncclUint8
constexpr int kMax = 2;      // ncclMax
constexpr int kNoTeam = -1;  // NCCL_SPLIT_NOCOLOR

// Where a PE has what this one has at `address`; null with a code, unless all of it is on the heap and can be
// addressed here.
char* there(const End& end, const void* address, uint64_t bytes, int pe, Error* error, int& code) {
    const Heap& heap = *end.heap;
    auto at = uint64_t(static_cast<const char*>(address) - heap.base);
    code = 0;
    if (pe < 0 || pe >= int(end.ranks.size()) || at > heap.bytes || bytes > heap.bytes - at) {
        code = report(FaultCode::kInternal, "outside of the symmetric heap, or no such PE", error);
        return nullptr;
    }
    char* place = heap.places[size_t(end.ranks[size_t(pe)])];
    if (place == nullptr)
        code = unsupported(
            "the memory of PE " + std::to_string(pe) +
                " cannot be addressed from here: only signals, and what comes with them, get there",
            error);
    return place ? place + at : nullptr;
}

int leave(Domain domain, Error* error) {
    End& end = end_of(domain);
    if (end.ended.exchange(true) || end.heap->pid != int(getpid())) return 0;
    if (end.team) {
        // Of a communicator that was aborted, members may be gone.
        auto finish = end.heap->aborted ? end.library().CommAbort : end.library().CommDestroy;
        int result = finish(end.comm);
        return result == nccl::kSuccess ? 0 : failed(end, "CommDestroy", result, error);
    }
    end.heap->left = true;
    int result = end.library().CommWindowDeregister(end.comm, end.heap->window);
    return result == nccl::kSuccess ? 0 : failed(end, "CommWindowDeregister", result, error);
}

int release(Domain domain, Error*) {
    delete &end_of(domain);
    return 0;
}

// The communicator of the heap is its backend's, which aborts it; that of a team is the team's.
int abort_domain(Domain domain, Error*) {
    End& end = end_of(domain);
    if (end.ended.exchange(true)) return 0;
    if (end.team)
        end.library().CommAbort(end.comm);
    else
        end.heap->aborted = true;
    return 0;
}

int allocate(Domain domain, uint64_t bytes, uint64_t align, uint64_t deadline, void** out, Error* error) {
    End& end = end_of(domain);
    if (end.team) return report(FaultCode::kInternal, "memory is allocated by all PEs, not by a team", error);
    if (int code = agree(end, kAllocate, int64_t(bytes), int64_t(align), deadline, error)) return code;
    uint64_t at = 0, whole = (std::max<uint64_t>(bytes, 1) + kLine - 1) / kLine * kLine;
    if (!end.heap->arena.take(whole, std::max(align, kLine), at))
        return report(FaultCode::kInternal,
                      "no room for " + std::to_string(bytes) + " bytes in the symmetric heap", error);
    *out = end.heap->base + at;
    return 0;
}

int free_memory(Domain domain, void* address, uint64_t deadline, Error* error) {
    End& end = end_of(domain);
    Heap& heap = *end.heap;
    auto at = uint64_t(static_cast<char*>(address) - heap.base);
    uint64_t bytes = heap.arena.size(at);
    if (end.team || bytes == 0) return report(FaultCode::kInternal, "nothing was allocated there", error);
    if (int code = agree(end, kFree, int64_t(at), 0, deadline, error)) return code;
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
    End& end = end_of(domain);
    if (end.over()) return gone(error);
    char* byte = end.heap->base;
    return checked(end, end.comm, "AllReduce",
                   end.library().AllReduce(byte, byte, 1, kByte, kMax, end.comm, stream), error);
}

int ptr(Domain domain, const void* address, uint64_t bytes, int pe, void** out, Error* error) {
    int code;
    *out = there(end_of(domain), address, bytes, pe, error, code);
    return code;
}

int put(Domain domain, void* to, const void* from, uint64_t bytes, int pe, Stream stream, Error* error) {
    int code;
    const End& end = end_of(domain);
    char* place = there(end, to, bytes, pe, error, code);
    return place ? copied(end, place, from, bytes, stream, error) : code;
}

int get(Domain domain, void* to, const void* from, uint64_t bytes, int pe, Stream stream, Error* error) {
    int code;
    const End& end = end_of(domain);
    char* place = there(end, from, bytes, pe, error, code);
    return place ? copied(end, to, place, bytes, stream, error) : code;
}

// What a stream gets after its copies comes after them.
int in_order(Domain, Stream, Error*) { return 0; }

// The counter that stands for a word; null with a code, where it stands for another one.
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
    End& end = end_of(domain);
    Heap& heap = *end.heap;
    if (end.over()) return gone(error);
    if (op != SignalOp::kAdd || value != 1)
        return unsupported("the library counts signals: a signal adds 1, and nothing else", error);
    auto at = bytes != 0 ? uint64_t(static_cast<char*>(to) - heap.base) : 0;
    if (pe < 0 || pe >= int(end.ranks.size()) || at > heap.bytes || bytes > heap.bytes - at)
        return report(FaultCode::kInternal, "outside of the symmetric heap, or no such PE", error);
    int code, rank = end.ranks[size_t(pe)];
    Counter* c = counter(heap, heap.sent[size_t(rank)], signal, error, code);
    if (c == nullptr) return code;
    const auto& library = end.library();
    int result = bytes != 0 ? library.PutSignal(from, bytes, kByte, rank, heap.window, at, heap.signals, 0, 0,
                                                heap.comm, stream)
                            : library.Signal(rank, heap.signals, 0, 0, heap.comm, stream);
    code = checked(end, heap.comm, bytes != 0 ? "PutSignal" : "Signal", result, error);
    if (code == 0) ++c->count;
    return code;
}

int wait_signal(Domain domain, const uint64_t* signal, Compare compare, uint64_t value, int source, uint64_t,
                Stream stream, Error* error) {
    End& end = end_of(domain);
    Heap& heap = *end.heap;
    if (end.over()) return gone(error);
    if (compare != Compare::kGe && compare != Compare::kGt)
        return unsupported("the library counts signals: a word can be waited for as >= or > a value only",
                           error);
    if (source < 0 || source >= int(end.ranks.size()))
        return unsupported("the library waits for signals of one rank: which one has to be said", error);
    int code, rank = end.ranks[size_t(source)];
    Counter* c = counter(heap, heap.awaited[size_t(rank)], signal, error, code);
    if (c == nullptr) return code;
    uint64_t least = value + (compare == Compare::kGt ? 1 : 0);
    if (least <= c->count) return 0;
    if (least - c->count > INT32_MAX)
        return report(FaultCode::kInternal, "more signals than the library waits for at once", error);
    nccl::WaitSignalDesc wait{int(least - c->count), rank, heap.signals, 0};
    code =
        checked(end, heap.comm, "WaitSignal", end.library().WaitSignal(1, &wait, heap.comm, stream), error);
    if (code == 0) c->count = least;
    return code;
}

// Which PE names a team that is none, or whose members name others; -1: nobody. All come to the same end.
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

// The library waits for all without a deadline of ours.
int team_split(Domain domain, int start, int stride, int size, uint64_t deadline, Domain* out, Error* error) {
    End& end = end_of(domain);
    *out = nullptr;
    if (end.team) return unsupported("a team is not split again: split the communicator", error);
    if (int code = meet(end, kSplit, start, stride, size, deadline, error)) return code;
    if (int pe = misplaced(*end.heap); pe >= 0)
        return report(FaultCode::kMismatch,
                      "the team of rank " + std::to_string(pe) + " is none, or its members name others",
                      error, {pe});
    double seconds = deadline > now_ns() ? double(deadline - now_ns()) / 1e9 : 0.0;
    auto [result, comm] = nccl::made_of(end.library(), end.comm, seconds, [&](nccl::Comm* place) {
        int color = size != 0 ? start : kNoTeam;
        int place_in_it = size > 1 ? (end.heap->rank - start) / stride : 0;
        return end.library().CommSplit(end.comm, color, place_in_it, place, nullptr);
    });
    if (result != nccl::kSuccess) return failed(end, "CommSplit", result, error);
    if (size == 0) return 0;
    auto made = std::make_unique<End>();
    made->heap = end.heap, made->comm = comm, made->team = true;
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
    auto end = std::make_unique<End>();
    end->heap = std::make_shared<Heap>(made);
    end->comm = made.comm;
    for (int rank = 0; rank < made.world; ++rank) end->ranks.push_back(rank);
    return end.release();
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
