// Runs a case on the simulated core.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/simulation/case.hpp"

namespace unicomm::simulation {

// One operation of a rank.
struct Step {
    int operation;
    int comm;
    uint64_t begin_ns, end_ns;
    Fault fault;
    bool broke = false;  // whether the communicator is broken since
    Fault again{};       // then: what it answers to the next operation
    uint64_t again_ns = 0;
};

struct Run {
    std::string stopped;                   // why the scheduler gave up; empty: all ranks ended
    std::vector<std::vector<Step>> steps;  // of each rank; the last one may be unfinished (end_ns = 0)
    std::vector<bool> finished;            // ranks that ran their whole program, and finalized
    std::vector<std::vector<bool>> left;   // for each communicator: ranks that had finalized it at the end
    std::vector<bool> reached;             // the causes of the case that had their effect
    std::vector<std::vector<int>> aborts;  // for each communicator: ranks that aborted it
    std::vector<uint64_t> broken_at;       // for each communicator: when the first rank knew; 0: never
    std::vector<std::optional<uint64_t>> ended_at;                  // of processes that were killed
    std::vector<std::vector<std::pair<uint64_t, uint64_t>>> stops;  // of each process
    std::vector<Switch> taken;
    uint64_t ns = 0, points = 0;

    uint64_t stopped_ns(int rank, uint64_t from, uint64_t to) const;
};

// `told` gets the schedule, line by line.
Run run_case(const Case& c, const Scheduler::Told& told = nullptr, bool each_point = false);

}  // namespace unicomm::simulation
