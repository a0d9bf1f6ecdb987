// The allocated parts of a symmetric heap. Deterministic: PEs that make the same calls get the same offsets.
#pragma once
#include <cstdint>
#include <map>

#include "base/free_spans.hpp"

namespace unicomm::symm {

class Arena {
  public:
    Arena(uint64_t begin, uint64_t end) { free_.give(begin, end - begin); }

    // Takes the first place with room. Returns false if there is none; `align` is a power of two.
    bool take(uint64_t bytes, uint64_t align, uint64_t& at) {
        for (auto span = free_.begin(); span != free_.end(); ++span) {
            auto [from, room] = *span;
            uint64_t place = (from + align - 1) & ~(align - 1);
            if (place - from > room || bytes > room - (place - from)) continue;
            free_.take(span, place, bytes);
            used_[at = place] = bytes;
            return true;
        }
        return false;
    }

    // Returns the bytes of the block that begins there, or 0.
    uint64_t size(uint64_t at) const {
        auto found = used_.find(at);
        return found == used_.end() ? 0 : found->second;
    }

    void give(uint64_t at) {
        uint64_t bytes = size(at);
        used_.erase(at);
        free_.give(at, bytes);
    }

  private:
    FreeSpans free_;
    std::map<uint64_t, uint64_t> used_;  // offset -> bytes
};

}  // namespace unicomm::symm
