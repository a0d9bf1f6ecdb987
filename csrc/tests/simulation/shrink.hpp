// Makes a failing case as short as possible: fewer ranks, operations, causes and switches.
#pragma once
#include <string>

#include "tests/simulation/case.hpp"

namespace unicomm::simulation {

// Returns the violated property of a case and its explanation, separated by a tab; empty if all hold. Runs
// it in a process of its own, whose crash is the property "crash".
std::string verdict(const Case& c, bool deaths);

// Returns the shortest case found that violates `property`, as `c` does.
Case shrunk(Case c, const std::string& property, bool deaths);

}  // namespace unicomm::simulation
