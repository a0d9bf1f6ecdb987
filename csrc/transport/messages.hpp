// Messages of one communicator that complete one by one.
#pragma once
#include <vector>

#include "transport/transport.hpp"

namespace unicomm::transport {

// A message that is over. `length`: its bytes, for a receive, which may be more than its memory has.
struct Finished {
    int number;
    int peer;
    size_t length;
};

class Messages {
  public:
    explicit Messages(std::shared_ptr<Transport> transport) : transport_(std::move(transport)) {}

    // Begins a message, under a number of the caller's. `peer` may be `kAnyRank` for a receive.
    void add(int number, bool send, int peer, void* data, size_t bytes, uint32_t tag);
    // Returns when a message is over; or, if `all`, when all are. Throws Failure.
    Ended wait(uint64_t deadline, bool all, bool rousable);
    // Those that are over since the last call. The last of all are not told before everything has left: then
    // the caller may do something else for a while.
    std::vector<Finished> take();

  private:
    struct Entry {
        int number;
        Request* request;
    };
    void collect();

    std::shared_ptr<Transport> transport_;
    std::vector<Entry> entries_;
    std::vector<Finished> finished_;
};

}  // namespace unicomm::transport
