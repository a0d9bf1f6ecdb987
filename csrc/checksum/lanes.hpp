// The lanes of a data checksum, and the kernels that advance them.
//
// A lane is 64 bits wide. One step takes in a word of 8 bytes (little endian):
//
//     lane = rotate_left(lane + word * kWordFactor, 31) * kLaneFactor     (mod 2^64)
//
// This is the round of xxHash's 64-bit form (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md)
// with more lanes and with factors below 2^32, of which vectors multiply with two instructions. A step can be
// undone: for one lane before it, different words lead to different lanes; for one word, different lanes do.
#pragma once
#include <cstdint>

namespace unicomm {

constexpr int kChecksumLanes = 32;
constexpr int64_t kStripe = 8 * kChecksumLanes;                         // bytes: a word for each lane
constexpr uint64_t kWordFactor = 0x85EBCA77, kLaneFactor = 0x9E3779B1;  // odd: two primes of xxHash

// Advances the lanes by `stripes` stripes: word i of a stripe goes into lane i.
using AdvanceLanes = void (*)(uint64_t* lanes, const char* data, int64_t stripes);

namespace baseline {
void advance_lanes(uint64_t* lanes, const char* data, int64_t stripes);
}
#ifdef UNICOMM_X86
namespace avx2 {
void advance_lanes(uint64_t* lanes, const char* data, int64_t stripes);
}
namespace avx512 {
void advance_lanes(uint64_t* lanes, const char* data, int64_t stripes);
}
#endif

}  // namespace unicomm
