// The state of rocSHMEM in this process, which has one world with one heap, and how its PEs agree on
// collectives: the library compares nothing and waits forever.
#pragma once
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "rocshmem/device_kernels.hpp"
#include "symm/table_error.hpp"

namespace unicomm::rocshmem_unit {

using symm::Error;
using symm::report;
using symm::Stream;

inline int checked(hipError_t result, const char* what, Error* error) {
    if (result == hipSuccess) return 0;
    return report(std::string(what) + ": " + hipGetErrorString(result), error);
}

inline hipStream_t of(Stream stream) { return static_cast<hipStream_t>(stream); }

// Kernels and functions on streams return nothing: checks for an error of their launch.
inline int launched(const char* what, Error* error) { return checked(hipGetLastError(), what, error); }

enum What : uint64_t { kAllocate = 1, kFree = 2, kSplit = 3, kInit = 4 };

// What a PE publishes at a meeting.
struct Words {
    uint64_t round, what, a, b, c;
    uint64_t unused[3];
};

struct Block {
    void* start;  // as returned by the library
    uint64_t bytes;
    uint64_t turn;  // order of allocation, in which PEs free what was left
};

struct World {
    int rank = 0, size = 0;
    int wave = 0;
    bool started = false;
    symm::UniqueId id{};
    bool broken = false;                // a meeting was given up, and its kernel still waits
    std::atomic<bool> given_up{false};  // set by an abort: not all PEs will reach the end
    Words* said = nullptr;              // symmetric: one per PE
    Words* draft = nullptr;             // host memory that the device can access: one more than PEs
    uint64_t* result = nullptr;
    hipStream_t stream = nullptr, glance = nullptr;
    hipEvent_t met = nullptr;  // recorded after the last barrier
    std::map<void*, Block> blocks;
    uint64_t turns = 0;
    int inits = 0, domains = 0;  // number of inits so far, and of open domains
};

struct Part {  // a domain: the world, or a team
    World* world = nullptr;
    Team team{};
    bool whole = false;
    int rank = 0;
    std::vector<int> pes;  // PEs of the world
    uint64_t round = 0;    // counts meetings; no other domain has the same numbers
    std::atomic<bool> aborted{false};

    int size() const { return int(pes.size()); }
};

inline Part& part_of(symm::Domain domain) { return *static_cast<Part*>(domain); }

inline dim3 group(const World& world, uint64_t bytes = 0) {
    // One wave is enough for the work of one thread; four keep a link busy. The device defines the size of a
    // wave (64 or 32).
    return dim3(unsigned(world.wave) * (bytes >= 4096 ? 4 : 1));
}

// Two barriers of one PE that ran at the same time, on two streams, would count each other's arrivals. So
// each waits for the one before, on whichever stream that is.
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

// Waits until the stream is done: kNone, with `result`; otherwise kTimeout or kAborted.
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

// Waits for the end of a meeting, the deadline, or an abort. A waiting kernel cannot be cancelled.
inline int await(Part& part, uint64_t deadline, Error* error) {
    World& w = *part.world;
    hipError_t result = hipSuccess;
    FaultCode fault = finish(part, w.stream, deadline, result);
    if (fault == FaultCode::kNone) return checked(result, "hipStreamQuery", error);
    w.broken = true;
    if (fault == FaultCode::kAborted) return report(fault, "", error);
    // Finds the PEs that have not arrived.
    std::vector<Words> seen(size_t(w.size));
    hipError_t copied =
        hipMemcpyAsync(w.draft + 1, w.said, sizeof(Words) * seen.size(), hipMemcpyDeviceToHost, w.glance);
    if (copied == hipSuccess) copied = hipStreamSynchronize(w.glance);
    if (copied == hipSuccess) std::memcpy(seen.data(), w.draft + 1, sizeof(Words) * seen.size());
    std::vector<int> absent;
    for (int pe = 0; copied == hipSuccess && pe < part.size(); ++pe) {
        bool here = pe == part.rank || seen[size_t(part.pes[size_t(pe)])].round == part.round;
        if (!here) absent.push_back(pe);
    }
    return report(FaultCode::kTimeout, "rocSHMEM cannot be interrupted: end the processes", error, absent);
}

// Exchanges what each PE of the domain passes; `all` is by PE of the domain. Waits on the host.
inline int meet(Part& part, What what, uint64_t a, uint64_t b, uint64_t c, uint64_t deadline,
                std::vector<Words>& all, Error* error) {
    World& w = *part.world;
    if (w.broken) return report(kGivenUp, error);
    if (part.aborted) return report(FaultCode::kAborted, "", error);
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
    if (code == 0) code = barrier_on(part, w.stream, error);  // all have read: the words may be overwritten
    if (code == 0) code = await(part, deadline, error);
    if (code != 0) return code;
    all.clear();
    for (int pe : part.pes) all.push_back(w.draft[1 + pe]);
    return 0;
}

// The same; all PEs must pass the same values.
inline int agree(Part& part, What what, uint64_t a, uint64_t b, uint64_t deadline, Error* error) {
    std::vector<Words> all;
    if (int code = meet(part, what, a, b, 0, deadline, all, error)) return code;
    auto same = [&](const Words& w) { return w.what == what && w.a == a && w.b == b; };
    if (std::all_of(all.begin(), all.end(), same)) return 0;
    static const char* names[] = {"?", "allocate", "free", "team_split", "init"};
    std::string detail;
    std::vector<int> pes;  // the same list on all PEs: none of them can say who is right
    for (size_t pe = 0; pe < all.size(); ++pe) {
        const Words& w = all[pe];
        pes.push_back(int(pe));
        detail +=
            (pe ? "; rank " : "rank ") + std::to_string(pe) + ": " + names[w.what <= kInit ? w.what : 0];
        if (w.what == kAllocate) detail += " " + std::to_string(w.a) + " bytes";
        if (w.what == kFree) detail += " at " + std::to_string(w.a);
    }
    return report(FaultCode::kMismatch, detail, error, pes);
}

}  // namespace unicomm::rocshmem_unit
