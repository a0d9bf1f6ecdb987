// How many operations a rank has begun on a communicator, counted by native and Python code together.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace unicomm {

// The numbers are read and changed with the GIL.
struct Counts {
    explicit Counts(int size) : size_(size), sent_(2 * size_t(size)), taken_(2 * size_t(size)) {}

    uint64_t entered = 0;  // collectives
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
    // `part`: of messages that are parts of a collective. They and the user's do not wait for each other, so
    // that ranks may begin them in different orders.
    uint64_t next(int peer, bool send, bool part = false) {
        return ++(send ? sent_ : taken_).at(place(peer, part));
    }
    uint64_t of(int peer, bool send, bool part) const {
        return (send ? sent_ : taken_).at(place(peer, part));
    }

  private:
    size_t place(int peer, bool part) const {
        if (peer < 0 || peer >= size_) throw std::out_of_range("no such peer");
        return size_t(part ? size_ + peer : peer);
    }

    int size_;
    std::vector<uint64_t> sent_, taken_;  // messages without a tag, by peer; then those that are parts
};

}  // namespace unicomm
