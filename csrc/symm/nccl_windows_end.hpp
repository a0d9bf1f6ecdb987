// A rank's end of a heap over NCCL's windows: what it keeps, its errors, and how all PEs meet.
#pragma once
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "symm/arena.hpp"
#include "symm/nccl_windows.hpp"

namespace unicomm::symm::nccl_windows {

constexpr uint64_t kLine = 64;
constexpr int kWords = 4;  // that a PE says at a meeting

enum Meeting : int64_t { kAllocate = 1, kFree, kSplit };

// One direction of a pair of PEs: which word its counter stands for, and how far it is.
struct Counter {
    const uint64_t* word = nullptr;
    uint64_t count = 0;
    bool stale = false;  // the word was freed: what was sent for it may still come
};

// A rank's heap, which teams share.
struct Heap : NcclHeap {
    int pid = int(getpid());
    Arena arena;
    std::vector<char*> places;  // of each rank's heap; null: cannot be addressed here
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

struct End {
    std::shared_ptr<Heap> heap;
    nccl::Comm comm = nullptr;  // of a team its own
    std::vector<int> ranks;     // of the heap's communicator, by PE
    bool team = false;
    std::atomic<bool> ended{false};

    bool over() const { return ended || heap->ended(); }
    const nccl::Functions& library() const { return (*heap->library)(); }
};

inline End& end_of(Domain domain) { return *static_cast<End*>(domain); }

uint64_t now_ns();

// Each fills the error and returns its code.
int report(FaultCode code, const std::string& detail, Error* error, const std::vector<int>& culprits = {});
inline int unsupported(const std::string& detail, Error* error) {
    return report(FaultCode::kUnsupported, detail, error);
}
inline int gone(Error* error) { return report(FaultCode::kAborted, "the communicator has ended", error); }
int failed(const End& end, const char* what, int result, Error* error);

// With blocking=0 a call may go on for a while after it has returned.
int checked(const End& end, nccl::Comm comm, const char* what, int result, Error* error);
int copied(const End& end, void* to, const void* from, uint64_t bytes, Stream stream, Error* error);

// Returns when all PEs of the heap have said something, on the default stream: the library runs what a
// communicator has to do one after the other, whatever the streams are.
int meet(End& end, Meeting what, int64_t a, int64_t b, int64_t c, uint64_t deadline, Error* error);
// The same, where all have to say the same.
int agree(End& end, Meeting what, int64_t a, int64_t b, uint64_t deadline, Error* error);

}  // namespace unicomm::symm::nccl_windows
