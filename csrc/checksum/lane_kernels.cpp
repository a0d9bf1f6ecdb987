// The loop over memory of a data checksum. Compiled once per instruction set, with UNICOMM_ISA as its name.
#include "checksum/lanes.hpp"
#include "reduce/simd.hpp"

#if defined(__SSE2__) && !defined(__AVX2__)
#include <emmintrin.h>
#endif

namespace unicomm::UNICOMM_ISA {
namespace {

using U64 = Vec<uint64_t>;

// a * factor, for a factor below 2^32. The compiler's own product of 64 bits takes one multiplication more.
UNICOMM_INLINE U64 times(U64 a, uint64_t factor) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const __m512i by = _mm512_set1_epi64(static_cast<int64_t>(factor));
    return (U64)_mm512_mul_epu32((__m512i)a, by) + ((U64)_mm512_mul_epu32((__m512i)(a >> 32), by) << 32);
#elif defined(__AVX2__)
    const __m256i by = _mm256_set1_epi64x(static_cast<int64_t>(factor));
    return (U64)_mm256_mul_epu32((__m256i)a, by) + ((U64)_mm256_mul_epu32((__m256i)(a >> 32), by) << 32);
#elif defined(__SSE2__)
    const __m128i by = _mm_set1_epi64x(static_cast<int64_t>(factor));
    return (U64)_mm_mul_epu32((__m128i)a, by) + ((U64)_mm_mul_epu32((__m128i)(a >> 32), by) << 32);
#else
    return a * factor;
#endif
}

}  // namespace

void advance_lanes(uint64_t* lanes, const char* data, int64_t stripes) {
    constexpr int kVectors = int(kStripe) / kVecBytes;
    char* at = reinterpret_cast<char*>(lanes);
    U64 state[kVectors];
    repeat<kVectors>([&](auto i) { state[i] = load<U64>(at + i * kVecBytes); });
    for (; stripes > 0; --stripes, data += kStripe) {
        repeat<kVectors>([&](auto i) {
            U64 sum = state[i] + times(load<U64>(data + i * kVecBytes), kWordFactor);
            state[i] = times((sum << 31) | (sum >> 33), kLaneFactor);
        });
    }
    repeat<kVectors>([&](auto i) { store(at + i * kVecBytes, state[i]); });
}

}  // namespace unicomm::UNICOMM_ISA
