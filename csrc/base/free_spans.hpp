// The free parts of an address range, by offset; adjacent parts are merged.
#pragma once
#include <cstdint>
#include <iterator>
#include <map>

namespace unicomm {

class FreeSpans {
  public:
    using Spans = std::map<uint64_t, uint64_t>;  // offset -> bytes
    using Span = Spans::iterator;
    Span begin() { return spans_.begin(); }
    Span end() { return spans_.end(); }

    // Takes `bytes` at `at`, which must lie within `span`.
    void take(Span span, uint64_t at, uint64_t bytes) {
        uint64_t from = span->first, end = from + span->second;
        spans_.erase(span);
        if (at > from) spans_[from] = at - from;
        if (at + bytes < end) spans_[at + bytes] = end - at - bytes;
    }
    void give(uint64_t at, uint64_t bytes) {
        auto next = spans_.lower_bound(at);
        if (next != spans_.end() && next->first == at + bytes) {
            bytes += next->second;
            next = spans_.erase(next);
        }
        if (next != spans_.begin()) {
            auto before = std::prev(next);
            if (before->first + before->second == at) {
                before->second += bytes;
                return;
            }
        }
        spans_[at] = bytes;
    }

  private:
    Spans spans_;
};

}  // namespace unicomm
