// The call path of an operation: the calls of the user and of libraries' wrappers that led to it, written
// into the ring once per path.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "recorder/call_stack.hpp"
#include "recorder/ring.hpp"

namespace unicomm {

// Whose code a file is, by its name. Folders end with a slash. unicomm/flight_recorder/ring/call_path.py has
// the names.
struct Libraries {
    std::string own;                          // this package
    std::string torch;                        // torch's folder
    std::string stdlib;                       // Python's standard library; installed packages lie in it
    std::vector<std::string> torch_wrappers;  // folders in torch's that wrap the user's model: DDP, FSDP, ...
    std::vector<std::string> wrappers;        // installed packages that run the user's training loop
};

class CallPaths {
  public:
    explicit CallPaths(ring::Writer& writer) : writer_(writer) {}
    ~CallPaths() { forget(); }
    CallPaths(const CallPaths&) = delete;
    CallPaths& operator=(const CallPaths&) = delete;

    // Returns what `Record::frame` holds for the call path of this thread. The GIL must be held.
    uint32_t current();

    static void set_libraries(Libraries libraries);

  private:
    struct Known {
        std::vector<Activation> calls;
        uint32_t frame;
    };
    uint32_t add(const CallStack& stack);
    void forget();

    ring::Writer& writer_;
    // By the hash of the call stack. The GIL guards it. It holds references to the codes, whose addresses are
    // keys.
    std::unordered_map<uint64_t, Known> known_;
};

}  // namespace unicomm
