// Copies into memory that other ranks have read, and out of it.
//
// In: a store to a cache line that another core holds must first
// take the line from that core. How long that takes depends on the placement of the two cores, which changes
// by the minute under a hypervisor. Measured on one machine: 64 KiB took 7 us at some times and 28 us at
// others, while stores that bypass the caches always took 2 us; reading the lines took 1.5 to 3.9 us with
// either. Bypassing is better only in the slow times. So the time of larger copies is measured, and selects
// the kind of the next ones.
//
// Out: a result that no cache can hold is written past the caches, which saves reading its lines first.
#pragma once
#include <cstdint>

namespace unicomm::shm {

constexpr uint64_t kSmallCopy = 16 * 1024;  // below, bypassing never pays

class Stager {
  public:
    // Copies `bytes`. The caller publishes them afterwards by a release store.
    void copy(char* to, const char* from, uint64_t bytes);
    // Always bypasses the caches: better for long messages, which one core writes while the other reads.
    static void stream(char* to, const char* from, uint64_t bytes);

  private:
    static constexpr int kPatience = 3;     // slow copies in a row: one may just be interrupted
    static constexpr uint32_t kProbe = 32;  // copies after which the other kind is tried again
    static constexpr uint32_t kTimed = 4;   // while copies are fast, only every so many-th one is timed
    bool streaming_ = false;
    int slow_ = 0;
    uint32_t copies_ = 0;
};

// For the results of an operation in which each rank reads and writes `bytes` of its tensors. They go past
// the caches if those of all ranks would fill more than `share` of the last one.
class ResultCopy {
  public:
    ResultCopy() = default;  // never past the caches
    ResultCopy(int world, uint64_t bytes, double share = 1);
    void copy(char* to, const char* from, uint64_t bytes) const;

  private:
    bool bypass_ = false;
};

}  // namespace unicomm::shm
