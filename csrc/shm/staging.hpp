// Writing into memory that other ranks have read. A store to a line that another core holds has to take the
// line away from it first. How long that takes depends on where the two cores lie, which under a hypervisor
// changes by the minute: measured on one machine, 64 KiB took 7 us at some times and 28 at others, while
// stores that go past the caches took 2 us always, and reading the lines 1.5 to 3.9 us with either. The
// latter are better only in the slow times. So the time of each larger copy is looked at, and tells which
// kind to use next.
#pragma once
#include <cstdint>

namespace unicomm::shm {

class Stager {
  public:
    // Copies `bytes`; the caller publishes them afterwards by a release store.
    void copy(char* to, const char* from, uint64_t bytes);
    // Always past the caches: better for long messages, which one core writes while the other reads.
    static void stream(char* to, const char* from, uint64_t bytes);
    bool streaming() const { return streaming_; }

  private:
    static constexpr uint64_t kSmall = 16 * 1024;  // below, streaming never pays
    static constexpr int kPatience = 3;            // slow copies in a row: one may have been interrupted
    static constexpr uint32_t kProbe = 32;         // copies after which the other kind is tried again
    bool streaming_ = false;
    int slow_ = 0;
    uint32_t streamed_ = 0;
};

}  // namespace unicomm::shm
