// Numbers in shared memory that carry a checksum, so that a reader notices a stray write of another process.
// It detects any single flipped bit, and all but one in 65536 of other damage.
#pragma once
#include <cstdint>

namespace unicomm::shm {

constexpr int kNumberBits = 48;  // nine years at one per microsecond

inline uint64_t with_checksum(uint64_t number) {
    return number | (number * 0x9e3779b97f4a7c15ull) >> kNumberBits << kNumberBits;
}

// Returns false if the checksum is wrong.
inline bool read_checksummed(uint64_t word, uint64_t& number) {
    number = word & ((uint64_t{1} << kNumberBits) - 1);
    return with_checksum(number) == word;
}

// A checksum of several values. A change of any one of them always changes it.
inline uint64_t checksum_of(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    return ((a + 1) * 0x9e3779b97f4a7c15ull) ^ ((b + 2) * 0xbf58476d1ce4e5b9ull) ^
           ((c + 3) * 0x94d049bb133111ebull) ^ ((d + 4) * 0xd6e8feb86659fd93ull);
}

}  // namespace unicomm::shm
