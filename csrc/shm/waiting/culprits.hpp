// Finds the ranks to blame for a timeout. A waiting rank publishes which rank it waits for, and counts how
// often it has checked. A rank whose count does not change is not waiting, whatever it published: it is
// stopped or busy elsewhere.
//
// So the culprits are not the ranks that wait themselves, but those at the end of the chains of waits. (Ranks
// that wait for each other are found earlier: deadlock.hpp.)
#pragma once
#include <cstdint>
#include <vector>

#include "shm/memory/segment.hpp"

namespace unicomm::shm {

class CulpritFinder {
  public:
    CulpritFinder(Segment& segment, int rank);

    // To be called when this rank has checked what it waits for, and has to go on.
    // With `anybody` it waits for no rank in particular.
    void note_look(const std::vector<int>& awaited, bool anybody);
    // Returns the awaited ranks, or ranks behind them, that keep the others waiting.
    std::vector<int> responsible(const std::vector<int>& awaited) const;
    // Returns the ranks that keep `rank` waiting if it waits for any rank: those that are here and do not
    // wait themselves; if there are none, those that have left; if all wait, all.
    std::vector<int> responsible_for_any(int rank) const;

  private:
    static constexpr uint64_t kWindowNs = 200000000;  // several checks of a waiting rank

    std::vector<uint32_t> snapshot() const;
    bool waiting(int rank) const;
    int next(int rank) const;  // the rank that it waits for, or -1

    Segment& segment_;
    int rank_;
    uint32_t wait_ = 0;  // this rank's, at the first snapshot
    uint64_t newer_at_ns_ = 0;
    std::vector<uint32_t> older_, newer_;  // the check counts of all ranks
};

}  // namespace unicomm::shm
