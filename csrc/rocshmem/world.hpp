// rocSHMEM has one world for a process, with one heap. What this unit keeps of it, and how its PEs agree on
// what they do together: the library compares nothing, and waits forever.
#pragma once
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "rocshmem/kernels.hpp"
#include "symm/table.hpp"

namespace unicomm::rocshmem_unit {

using symm::Error;
using symm::Stream;

inline int failed(const std::string& detail, Error* error, FaultCode code = FaultCode::kInternal) {
    error->n_culprits = 0;
    size_t n = std::min(detail.size(), sizeof error->detail - 1);
    std::memcpy(error->detail, detail.data(), n);
    error->detail[n] = 0;
    return int(code);
}

inline int checked(hipError_t result, const char* what, Error* error) {
    if (result == hipSuccess) return 0;
    return failed(std::string(what) + ": " + hipGetErrorString(result), error);
}

inline hipStream_t of(Stream stream) { return static_cast<hipStream_t>(stream); }

// Kernels and functions on streams return nothing: what went wrong at their start is asked for.
inline int launched(const char* what, Error* error) { return checked(hipGetLastError(), what, error); }

inline uint64_t now_ns() {
    timespec t{};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return uint64_t(t.tv_sec) * 1000000000u + uint64_t(t.tv_nsec);
}

enum What : uint64_t { kAllocate = 1, kFree = 2, kSplit = 3, kInit = 4 };

// What a PE tells the others at a meeting.
struct Words {
    uint64_t round, what, a, b, c;
    uint64_t unused[3];
};

struct Block {
    void* start;  // as the library gave it
    uint64_t bytes;
    uint64_t turn;  // PEs free what was left in the order in which it was allocated
};

struct World {
    int rank = 0, size = 0;
    int wave = 0;
    bool started = false;
    symm::UniqueId id{};
    bool broken = false;                // a meeting was given up: its kernel still waits
    std::atomic<bool> given_up{false};  // by a communicator: not all PEs will come to the end
    Words* said = nullptr;              // symmetric: one for each PE
    Words* draft = nullptr;  // of the host, where the device can read and write it: one more than PEs
    uint64_t* result = nullptr;
    hipStream_t stream = nullptr, glance = nullptr;
    hipEvent_t met = nullptr;  // the last barrier that was issued
    std::map<void*, Block> blocks;
    uint64_t turns = 0;
    int inits = 0, domains = 0;  // that there were, and are
};

struct Part {  // the world, or a team of it: what a Domain is
    World* world = nullptr;
    Team team{};
    bool whole = false;
    int rank = 0;
    std::vector<int> pes;  // of the world
    uint64_t round = 0;    // of meetings; no other part has the same numbers
    std::atomic<bool> aborted{false};

    int size() const { return int(pes.size()); }
};

inline Part& part_of(symm::Domain domain) { return *static_cast<Part*>(domain); }

inline dim3 group(const World& world, uint64_t bytes = 0) {
    // A wave is enough for what one thread does, four keep a link busy; 64 threads or 32 each, as the device
    // says.
    return dim3(unsigned(world.wave) * (bytes >= 4096 ? 4 : 1));
}

// Two barriers of a PE that run at the same time, on two streams, would take each other's arrivals for
// theirs: each waits for the one before, on whichever stream that is.
inline int barrier_on(Part& part, hipStream_t stream, Error* error) {
    World& w = *part.world;
    if (int code = checked(hipStreamWaitEvent(stream, w.met, 0), "hipStreamWaitEvent", error)) return code;
    if (part.whole) {
        if constexpr (kHostBarrier) {
            rocshmem_barrier_all_on_stream(stream);
        } else {
            hipLaunchKernelGGL(barrier_kernel, dim3(1), group(w), 0, stream);
        }
    } else {
        if constexpr (kHostTeamBarrier) {
            rocshmem_barrier_on_stream(part.team, stream);
        } else {
            hipLaunchKernelGGL(team_barrier_kernel, dim3(1), group(w), 0, stream, part.team);
        }
    }
    if (int code = launched("barrier", error)) return code;
    return checked(hipEventRecord(w.met, stream), "hipEventRecord", error);
}

inline int put_on(World& world, void* to, const void* from, uint64_t bytes, int pe, hipStream_t stream,
                  Error* error) {
    if constexpr (kHostPut) {
        rocshmem_putmem_on_stream(to, from, bytes, pe, stream);
    } else {
        hipLaunchKernelGGL(put_kernel, dim3(1), group(world, bytes), 0, stream, to, from, size_t(bytes), pe);
    }
    return launched("put", error);
}

constexpr const char* kGivenUp = "rocSHMEM still waits in an operation that was given up: end the processes";

// Until all on the stream is done: kNone, with `result`. Else kTimeout or kAborted.
inline FaultCode finish(Part& part, hipStream_t stream, uint64_t deadline, hipError_t& result) {
    for (int turn = 0;; ++turn) {
        result = hipStreamQuery(stream);
        if (result != hipErrorNotReady) return FaultCode::kNone;
        if (part.aborted) return FaultCode::kAborted;
        if (now_ns() >= deadline) return FaultCode::kTimeout;
        if (turn < 1000) {
            sched_yield();
        } else {
            usleep(50);
        }
    }
}

// Until a meeting is over, the deadline, or an abort. A kernel that waits cannot be called back.
inline int await(Part& part, uint64_t deadline, Error* error) {
    World& w = *part.world;
    hipError_t result = hipSuccess;
    FaultCode fault = finish(part, w.stream, deadline, result);
    if (fault == FaultCode::kNone) return checked(result, "hipStreamQuery", error);
    w.broken = true;
    if (fault == FaultCode::kAborted) return failed("", error, fault);
    // Who is absent.
    std::vector<Words> seen(size_t(w.size));
    hipError_t copied =
        hipMemcpyAsync(w.draft + 1, w.said, sizeof(Words) * seen.size(), hipMemcpyDeviceToHost, w.glance);
    if (copied == hipSuccess) copied = hipStreamSynchronize(w.glance);
    if (copied == hipSuccess) std::memcpy(seen.data(), w.draft + 1, sizeof(Words) * seen.size());
    failed("rocSHMEM cannot be interrupted: end the processes", error);
    for (int pe = 0; copied == hipSuccess && pe < part.size(); ++pe) {
        bool here = pe == part.rank || seen[size_t(part.pes[size_t(pe)])].round == part.round;
        if (!here && error->n_culprits < 64) error->culprits[error->n_culprits++] = pe;
    }
    return int(FaultCode::kTimeout);
}

// All PEs of the part say what they do; `all`: what each said, by its PE of the part. Waits on the host.
inline int meet(Part& part, What what, uint64_t a, uint64_t b, uint64_t c, uint64_t deadline,
                std::vector<Words>& all, Error* error) {
    World& w = *part.world;
    if (w.broken) return failed(kGivenUp, error);
    if (part.aborted) return failed("", error, FaultCode::kAborted);
    *w.draft = Words{++part.round, what, a, b, c, {}};
    Words* own = w.said + w.rank;
    int code = checked(hipMemcpyAsync(own, w.draft, sizeof(Words), hipMemcpyHostToDevice, w.stream),
                       "hipMemcpyAsync", error);
    for (int i = 1; code == 0 && i < part.size(); ++i) {
        int pe = part.pes[size_t((part.rank + i) % part.size())];
        code = put_on(w, own, own, sizeof(Words), pe, w.stream, error);
    }
    if (code == 0) code = barrier_on(part, w.stream, error);
    if (code == 0) {
        code = checked(hipMemcpyAsync(w.draft + 1, w.said, sizeof(Words) * size_t(w.size),
                                      hipMemcpyDeviceToHost, w.stream),
                       "hipMemcpyAsync", error);
    }
    if (code == 0) code = barrier_on(part, w.stream, error);  // all have read: the words may be written again
    if (code == 0) code = await(part, deadline, error);
    if (code != 0) return code;
    all.clear();
    for (int pe : part.pes) all.push_back(w.draft[1 + pe]);
    return 0;
}

// The same, and all must say the same.
inline int agree(Part& part, What what, uint64_t a, uint64_t b, uint64_t deadline, Error* error) {
    std::vector<Words> all;
    if (int code = meet(part, what, a, b, 0, deadline, all, error)) return code;
    auto same = [&](const Words& w) { return w.what == what && w.a == a && w.b == b; };
    if (std::all_of(all.begin(), all.end(), same)) return 0;
    static const char* names[] = {"?", "allocate", "free", "team_split", "init"};
    std::string detail;
    for (size_t pe = 0; pe < all.size(); ++pe) {
        const Words& w = all[pe];
        detail +=
            (pe ? "; rank " : "rank ") + std::to_string(pe) + ": " + names[w.what <= kInit ? w.what : 0];
        if (w.what == kAllocate) detail += " " + std::to_string(w.a) + " bytes";
        if (w.what == kFree) detail += " at " + std::to_string(w.a);
    }
    failed(detail, error);
    for (int pe = 0; pe < part.size() && pe < 64; ++pe) error->culprits[error->n_culprits++] = pe;
    return int(FaultCode::kMismatch);  // the same list on all: nobody says who is right
}

}  // namespace unicomm::rocshmem_unit
