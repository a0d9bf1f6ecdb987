// On which cores the ranks of a group are. It matters where they outnumber the cores: a rank that waits
// leaves its core only to a rank that it waits for, and no core keeps more than its share of them.
#pragma once
#include <atomic>
#include <cstdint>

#include "shm/memory/segment.hpp"

namespace unicomm::shm {

int usable_cores();

class Placement {
  public:
    Placement(Segment& segment, int rank);

    // Whether there are more ranks than cores.
    bool crowded() const { return crowded_; }
    // Tells the others on which core this rank is, if there are more ranks than cores. Returns whether it has
    // moved to another one.
    bool tell() {
        if (!crowded_) return false;
        write_core();
        return ++told_ % kToldUntilSpread == 0 && spread();
    }
    // To be called when a yield has had an effect, however many ranks there are: also looks at once whether
    // another core is emptier.
    bool tell_of_yield() {
        write_core();
        return spread();
    }
    // Whether the other rank was last on this rank's core.
    bool beside(int rank) const {
        return segment_.control(rank).core.load(std::memory_order_relaxed) == core_;
    }
    // A foreign process has used this core. If this rank has just moved there, its next move comes later.
    void taken(uint64_t now_ns);

  private:
    static constexpr uint32_t kToldUntilSpread = 32;

    void write_core();
    bool spread();

    Segment& segment_;
    int rank_;
    int cores_;  // that this process may use
    bool crowded_;
    uint32_t core_ = 0;      // 1 + the core of this rank, which it has told
    uint32_t told_ = 0;      // how often it has told it
    uint64_t moved_ns_ = 0;  // when it last moved to another core
    uint64_t stays_ns_ = 0;  // until when it does not move
};

}  // namespace unicomm::shm
