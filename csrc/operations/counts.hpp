// How many operations a rank has begun on a communicator, counted by native and Python code together.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace unicomm {

// The numbers are read and changed with the GIL.
struct Counts {
    explicit Counts(int size) : sent(size_t(size)), taken(size_t(size)) {}

    uint64_t entered = 0;               // collectives
    std::vector<uint64_t> sent, taken;  // messages without a tag, by peer
    // Codes; 0 for none. The collective that runs in native code, and the operation of which this
    // communicator's are parts.
    std::atomic<uint32_t> running{0}, inside{0};
    std::atomic<uint64_t> whole{0};  // collectives of which this communicator's are parts
    // A rank has left: native code leaves all operations to Python code, which knows who may still be needed.
    std::atomic<bool> left{false};
    // What another rank has told is being read, and is not known yet.
    std::atomic<bool> hearing{false};

    void begin_whole(uint32_t code) {
        ++whole;
        inside = code;
    }
    uint64_t next(int peer, bool send) { return ++(send ? sent : taken).at(size_t(peer)); }
};

}  // namespace unicomm
