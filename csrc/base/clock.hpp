// The monotonic clock in nanoseconds, which deadlines and records use.
#pragma once
#include <time.h>

#include <cstdint>
#ifdef UNICOMM_SIMULATION
#include "base/simulation.hpp"
#endif

namespace unicomm {

inline uint64_t clock_ns(clockid_t clock) {
    timespec t{};
    clock_gettime(clock, &t);
    return uint64_t(t.tv_sec) * 1000000000ull + uint64_t(t.tv_nsec);
}

inline uint64_t now_ns() {
#ifdef UNICOMM_SIMULATION
    return simulation::now_ns();
#else
    return clock_ns(CLOCK_MONOTONIC);
#endif
}

// Timeouts beyond 1e9 seconds mean no deadline.
inline uint64_t deadline_after(double seconds, uint64_t now = now_ns()) {
    return seconds > 1e9 ? ~uint64_t{0} : now + static_cast<uint64_t>(seconds * 1e9);
}

}  // namespace unicomm
