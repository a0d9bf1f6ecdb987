// What a seed determines: the ranks, their program, what goes wrong, and the schedule. A case is also one
// line of text, so that it outlives changes of the generator.
#pragma once
#include <string>
#include <vector>

#include "tests/random_operations.hpp"
#include "tests/simulation/scheduler.hpp"

namespace unicomm::simulation {

// What goes wrong: at operation `at` of the program, or when `rank` reaches its point number `at`.
struct Cause {
    enum Kind {
        // before operation `at`
        kDelay,     // the rank computes for `ms`
        kGone,      // the rank calls nothing any more, and stays
        kFinalize,  // the rank finalizes and leaves
        kSkip,      // the rank leaves out the operation
        kDiffer,    // the rank calls the operation with another root or size
        kCross,     // the rank and the next one first receive from each other
        kSwap,      // the rank calls this operation and the next one in the other order
        // at a point
        kKill,
        kStop,   // for `ms`
        kAbort,  // another thread of the rank aborts
        kKinds
    };
    static constexpr const char* kNames[kKinds] = {"delay", "gone", "finalize", "skip", "differ",
                                                   "cross", "swap", "kill",     "stop", "abort"};
    int kind;
    int rank;
    uint64_t at;
    uint64_t ms = 0;
    bool of_point() const { return kind >= kKill; }
};

struct Case {
    int world = 2;
    int comms = 1;  // operation i is on communicator i % comms
    uint64_t limit_ms = 1000;
    std::vector<testing::Operation> program;
    std::vector<Cause> causes;
    Settings settings;  // its events are those of the causes

    bool can_finish() const;  // whether only delays and stops that end in time go wrong
};

Case random_case(uint64_t seed);
std::string text_of(const Case& c);
Case read_case(const std::string& text);  // throws std::runtime_error

}  // namespace unicomm::simulation
