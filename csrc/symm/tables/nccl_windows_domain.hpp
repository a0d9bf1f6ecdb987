// A domain over NCCL windows: its state, its errors, and the meetings of all PEs.
#pragma once
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "symm/arena.hpp"
#include "symm/table_error.hpp"
#include "symm/tables/nccl_windows.hpp"

namespace unicomm::symm::nccl_windows {

constexpr uint64_t kLine = 64;
constexpr int kWords = 4;  // that a PE publishes at a meeting

enum Meeting : int64_t { kAllocate = 1, kFree, kSplit };

// One direction of a pair of PEs: the word that its counter stands for, and the count.
struct Counter {
    const uint64_t* word = nullptr;
    uint64_t count = 0;
    bool stale = false;  // the word was freed, but signals for it may still arrive
};

// The heap of a rank, which teams share.
struct Heap : NcclHeap {
    int pid = int(getpid());
    Arena arena;
    std::vector<char*> places;  // address of the heap of each rank; null if it cannot be addressed
    std::vector<Counter> sent, awaited;
    std::atomic<bool> left{false}, aborted{false};
    std::vector<int64_t> told, heard;  // a device may still write here after a deadline

    explicit Heap(const NcclHeap& made)
        : NcclHeap(made),
          arena(nccl_windows_reserve(made.world), made.bytes),
          places(size_t(made.world)),
          sent(size_t(made.world)),
          awaited(size_t(made.world)),
          told(kWords),
          heard(size_t(kWords * made.world)) {
        auto pointer = (*library)().GetPeerDevicePointer;
        for (int r = 0; pointer != nullptr && r < world; ++r) {
            void* place = nullptr;
            if (pointer(window, 0, r, &place) == nccl::kSuccess)
                places[size_t(r)] = static_cast<char*>(place);
        }
        places[size_t(rank)] = base;
    }
    // A forked child has no device.
    ~Heap() {
        if (pid == int(getpid())) (*library)().MemFree(base);
    }
    bool ended() const { return left || aborted; }
};

struct WindowDomain {
    std::shared_ptr<Heap> heap;
    nccl::Comm comm = nullptr;  // a team has its own
    std::vector<int> ranks;     // rank in the heap's communicator, by PE
    bool team = false;
    std::atomic<bool> ended{false};

    bool over() const { return ended || heap->ended(); }
    const nccl::Functions& library() const { return (*heap->library)(); }
};

inline WindowDomain& domain_of(Domain domain) { return *static_cast<WindowDomain*>(domain); }

// Each fills the error and returns its code.
inline int unsupported(const std::string& detail, Error* error) {
    return report(FaultCode::kUnsupported, detail, error);
}
inline int gone(Error* error) { return report(FaultCode::kAborted, "the communicator has ended", error); }
int failed(const WindowDomain& self, const char* what, int result, Error* error);

// Waits for the call to complete: with blocking=0 it may continue after it has returned.
int checked(const WindowDomain& self, nccl::Comm comm, const char* what, int result, Error* error);
int copied(const WindowDomain& self, void* to, const void* from, uint64_t bytes, Stream stream, Error* error);

// Exchanges what each PE passes. Returns when all PEs of the heap have arrived. Uses the default stream: the
// library runs the operations of a communicator in order, whatever their streams.
int meet(WindowDomain& self, Meeting what, int64_t a, int64_t b, int64_t c, uint64_t deadline, Error* error);
// The same; all PEs must pass the same values.
int agree(WindowDomain& self, Meeting what, int64_t a, int64_t b, uint64_t deadline, Error* error);

}  // namespace unicomm::symm::nccl_windows
