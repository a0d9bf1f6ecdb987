// Numbers in shared memory that carry a mark of their value: a reader sees when something else than the code
// that counts has written there, a stray pointer of another process for instance. Any single bit that flips
// is seen, and of other damage all but one in 65536.
#pragma once
#include <cstdint>

namespace unicomm::shm {

constexpr int kNumberBits = 48;  // at one a microsecond, nine years

inline uint64_t marked(uint64_t number) {
    return number | (number * 0x9e3779b97f4a7c15ull) >> kNumberBits << kNumberBits;
}

// False: that is no marked number.
inline bool read_marked(uint64_t word, uint64_t& number) {
    number = word & ((uint64_t{1} << kNumberBits) - 1);
    return marked(number) == word;
}

// A check of several values: a change of any one of them always changes it.
inline uint64_t check_of(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    return ((a + 1) * 0x9e3779b97f4a7c15ull) ^ ((b + 2) * 0xbf58476d1ce4e5b9ull) ^
           ((c + 3) * 0x94d049bb133111ebull) ^ ((d + 4) * 0xd6e8feb86659fd93ull);
}

}  // namespace unicomm::shm
