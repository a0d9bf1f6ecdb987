// Who waits for whom. A rank that waits says for whom, and counts how often it looked and found nothing: one
// whose count stands still is not waiting, whatever it last said, but stopped or busy elsewhere.
//
// From that a rank knows whom to blame when its time is over: not those that wait themselves, but those at
// whom the waiting ends. And when the chain that begins at itself comes back to it, in the same waits and
// after everybody in it has looked again, then none of them will ever go on: nobody can do anything for the
// others while it waits, so that what each found then stays true.
#pragma once
#include <cstdint>
#include <vector>

#include "core/error.hpp"
#include "shm/segment.hpp"

namespace unicomm::shm {

class Waits {
  public:
    Waits(Segment& segment, int rank);

    // This rank has looked at what it waits for, and has to go on. `operation` is 0 for one that more
    // messages may join: what it lacks may still come from this very rank.
    void looked(const std::vector<int>& awaited, uint32_t operation);
    // Of those that are awaited, the ones that keep the others waiting.
    std::vector<int> responsible(const std::vector<int>& awaited) const;
    // Ranks in a circle in which each waits for the next one, from this one on; empty when there is none.
    std::vector<int> circle() const;
    // What a rank said that it waits in, for whom.
    Claim claim(int rank) const;

  private:
    struct Seen {
        uint32_t waits_for, wait, looks;
    };
    static constexpr uint64_t kWindowNs = 200000000;  // several looks of a waiting rank

    std::vector<Seen> look() const;
    bool waiting(int rank) const;
    int next(int rank) const;  // whom it waits for, or -1

    Segment& segment_;
    int rank_;
    uint32_t wait_ = 0;  // this rank's, when the snapshots began
    uint64_t newer_at_ns_ = 0;
    bool full_ = false;  // `older_` is a window older than now
    std::vector<Seen> older_, newer_;
};

}  // namespace unicomm::shm
