// Which parts of a symmetric heap are in use. Deterministic: PEs that make the same calls get the same
// offsets.
#pragma once
#include <cstdint>
#include <map>

namespace unicomm::symm {

class Arena {
  public:
    Arena(uint64_t begin, uint64_t end) { free_[begin] = end - begin; }

    // The first place that has room. False when none has; `align` is a power of two.
    bool take(uint64_t bytes, uint64_t align, uint64_t& at) {
        for (auto& [from, room] : free_) {
            uint64_t place = (from + align - 1) & ~(align - 1);
            if (place - from > room || bytes > room - (place - from)) continue;
            uint64_t begin = from, end = from + room;
            free_.erase(begin);
            if (place > begin) free_[begin] = place - begin;
            if (place + bytes < end) free_[place + bytes] = end - place - bytes;
            used_[at = place] = bytes;
            return true;
        }
        return false;
    }

    // Bytes of what begins there; 0: nothing does.
    uint64_t size(uint64_t at) const {
        auto found = used_.find(at);
        return found == used_.end() ? 0 : found->second;
    }

    void give(uint64_t at) {
        uint64_t bytes = size(at);
        used_.erase(at);
        auto next = free_.lower_bound(at);
        if (next != free_.end() && next->first == at + bytes) {
            bytes += next->second;
            next = free_.erase(next);
        }
        if (next != free_.begin()) {
            auto before = std::prev(next);
            if (before->first + before->second == at) {
                before->second += bytes;
                return;
            }
        }
        free_[at] = bytes;
    }

  private:
    std::map<uint64_t, uint64_t> free_, used_;  // offset -> bytes
};

}  // namespace unicomm::symm
