// On which cores the ranks of a group are. It matters where they outnumber the cores: a rank that waits
// leaves its core only to a rank that it waits for, and no core has more ranks than its part for long.
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
    // The same, and looks for another core at once: a yield of this rank has had an effect.
    bool tell_of_yield() {
        write_core();
        return spread();
    }
    // Whether the other rank was last on this rank's core.
    bool beside(int rank) const {
        return segment_.control(rank).core.load(std::memory_order_relaxed) == core_;
    }
    // A foreign process had this core for longer. If this rank has just moved there, it had better not have.
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
