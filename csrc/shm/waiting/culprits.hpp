// Finds the ranks to blame for a timeout. A waiting rank publishes which rank it waits for, and counts how
// often it has checked. A rank whose count does not change is not waiting, whatever it published: it is
// stopped or busy elsewhere.
//
// So the culprits are not the ranks that wait themselves, but those at the end of the chains of waits. (Ranks
// that wait for each other are found earlier: deadlock.hpp.) A chain goes on through other communicators of
// the same ranks, symmetric memory included, by the wait tables of the processes (wait_table.hpp).
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "shm/memory/segment.hpp"
#include "shm/waiting/wait_table.hpp"

namespace unicomm::shm {

class CulpritFinder {
  public:
    CulpritFinder(Segment& segment, int rank);

    // To be called when this rank has checked what it waits for, and has to go on.
    // With `anybody` it waits for no rank in particular; with `aside` no thread of the program waits.
    void note_look(const std::vector<int>& awaited, bool anybody, bool aside);
    // Returns the awaited ranks, or ranks behind them, that keep the others waiting.
    std::vector<int> responsible(const std::vector<int>& awaited) const;
    // Returns the ranks that keep `rank` waiting if it waits for any rank: those that are here and do not
    // wait themselves; if there are none, those that have left; if all wait, all.
    std::vector<int> responsible_for_any(int rank) const;

  private:
    static constexpr uint64_t kWindowNs = 200000000;  // several checks of a waiting rank

    // A wait of a rank in another communicator.
    struct Elsewhere {
        int awaited = -1, slot = 0;
        uint64_t number = 0, seen_ns = 0;  // when it was last seen to go on
    };

    std::vector<uint32_t> snapshot() const;
    bool waiting(int rank) const;
    void look_elsewhere(uint64_t now);
    std::shared_ptr<const WaitTable> table_of(int rank) const;  // null if it is not the rank's alone
    int awaited_rank(const Waiting& wait) const;
    int elsewhere(int rank) const;  // the rank that it waits for in another communicator, or -1
    int next(int rank) const;       // the rank that it waits for, or -1

    Segment& segment_;
    int rank_;
    uint32_t wait_ = 0;  // this rank's, at the first snapshot
    uint64_t began_ns_ = 0, newer_at_ns_ = 0;
    std::vector<uint32_t> older_, newer_;  // the check counts of all ranks
    std::vector<Elsewhere> elsewhere_;
    std::map<int, std::shared_ptr<const WaitTable>> tables_;                        // by rank
    std::map<std::pair<int, int>, std::pair<uint64_t, uint64_t>> waits_and_looks_;  // by rank and slot
};

}  // namespace unicomm::shm
