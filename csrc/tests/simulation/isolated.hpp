// Runs a function in a forked process: what crashes, hangs or leaks there does no harm here.
#pragma once
#include <functional>
#include <string>

namespace unicomm::simulation {

struct Answer {
    bool whole = false;  // the process ended as it should
    std::string text;    // what it said
    std::string ended;   // if not `whole`: how it ended
};

// `body` says things with its argument. It is killed when it has run for `seconds` of a core and said
// nothing.
Answer isolated(const std::function<void(const std::function<void(const std::string&)>&)>& body,
                unsigned seconds);

}  // namespace unicomm::simulation
