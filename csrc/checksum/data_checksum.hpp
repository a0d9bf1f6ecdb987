// A 64-bit checksum of tensors, at the speed of memory.
//
// Two equally long sequences of bytes that differ within one aligned word of 8 bytes only, such as by one
// flipped bit, always have different checksums: each step by which a word reaches the result can be undone
// (lanes.hpp). Any other difference is missed with a chance of about 2^-64. It is no protection against
// someone who chooses the data.
#pragma once
#include <cstdint>

namespace unicomm {

// The checksum of several pieces of memory, in their order. What a checksum is made of:
//
// - A piece is padded with zeros to whole stripes of 256 bytes, whose 32 words go into 32 lanes.
//   The lanes begin with 1, 2, ... 32. Then h = bytes * kJoin, and for each lane in order
//   h = join(h, lane).
// - The sum of all pieces begins with h = their number, and for each piece h = join(h, its h); it is mixed at
//   the end so that all bits depend on all.
//
// join(h, x) = rotate_left(h ^ x, 27) * kJoin (mod 2^64), which can be undone as well.
class DataChecksum {
  public:
    explicit DataChecksum(uint64_t pieces) : sum_(pieces) {}
    void add(const void* data, int64_t bytes);  // any alignment
    uint64_t value() const;

  private:
    uint64_t sum_;
};

}  // namespace unicomm
