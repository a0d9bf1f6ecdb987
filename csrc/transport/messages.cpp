// Messages that complete one by one, each of which is one request.
#include "transport/messages.hpp"

#include <utility>

namespace unicomm::transport {

void Messages::add(int number, bool send, int peer, void* data, size_t bytes, uint32_t tag) {
    Request* request = send ? transport_->send(peer, data, bytes, Kind::kMessage, tag)
                            : transport_->receive(peer, data, bytes, Kind::kMessage, tag);
    entries_.push_back({number, request});
}

void Messages::collect() {
    size_t left = 0;
    for (const Entry& entry : entries_) {
        if (!entry.request->done) {
            entries_[left++] = entry;
            continue;
        }
        finished_.push_back({entry.number, entry.request->peer, entry.request->length});
        transport_->release(entry.request);
    }
    entries_.resize(left);
}

Ended Messages::wait(uint64_t deadline, bool all, bool rousable) {
    auto done = [&] {
        collect();
        return entries_.empty() ? transport_->flushed() : !all && !finished_.empty();
    };
    return transport_->wait(done, deadline, rousable);
}

std::vector<Finished> Messages::take() {
    // A wait that was roused, or had no time left, may have ended before the flush.
    if (entries_.empty() && !transport_->flushed()) return {};
    return std::exchange(finished_, {});
}

}  // namespace unicomm::transport
