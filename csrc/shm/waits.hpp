// Who waits for whom. A rank that waits says for whom, and counts how often it looked and found nothing: one
// whose count stands still is not waiting, whatever it last said, but stopped or busy elsewhere.
//
// From that a rank knows whom to blame when its time is over: not those that wait themselves, but those at
// whom the waiting ends. (Ranks that wait for each other are found earlier: deadlock.hpp.)
#pragma once
#include <cstdint>
#include <vector>

#include "shm/segment.hpp"

namespace unicomm::shm {

class Waits {
  public:
    Waits(Segment& segment, int rank);

    // This rank has looked at what it waits for, and has to go on.
    void looked(const std::vector<int>& awaited);
    // Of those that are awaited, the ones that keep the others waiting.
    std::vector<int> responsible(const std::vector<int>& awaited) const;

  private:
    static constexpr uint64_t kWindowNs = 200000000;  // several looks of a waiting rank

    std::vector<uint32_t> look() const;
    bool waiting(int rank) const;
    int next(int rank) const;  // whom it waits for, or -1

    Segment& segment_;
    int rank_;
    uint32_t wait_ = 0;  // this rank's, when the snapshots began
    uint64_t newer_at_ns_ = 0;
    std::vector<uint32_t> older_, newer_;  // all ranks' looks
};

}  // namespace unicomm::shm
