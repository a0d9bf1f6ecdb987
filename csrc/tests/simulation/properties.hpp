// What must hold for every run, whatever the schedule and the faults.
#pragma once
#include <optional>
#include <string>

#include "tests/simulation/world.hpp"

namespace unicomm::simulation {

struct Violation {
    std::string property;  // its name
    std::string text;
};

// `deaths`: also checks that every rank in an operation notices within a second that a process has ended.
std::optional<Violation> violated(const Case& c, const Run& run, bool deaths);

// What each rank did, for a reader.
std::string story(const Case& c, const Run& run);

}  // namespace unicomm::simulation
