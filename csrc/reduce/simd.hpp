// Vectors of the instruction set that this translation unit is compiled for. Everything here has internal
// linkage: the linker must not merge functions of different instruction sets.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define UNICOMM_INLINE inline __attribute__((always_inline))

namespace unicomm::UNICOMM_ISA {
namespace {

#if defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int kVecBytes = 64;
#elif defined(__AVX2__)
constexpr int kVecBytes = 32;
#else
constexpr int kVecBytes = 16;
#endif

template <class T>
struct VecOf {
    typedef T type __attribute__((vector_size(kVecBytes)));
};
template <class T>
using Vec = typename VecOf<T>::type;
template <class T>
constexpr int kLanes = kVecBytes / int(sizeof(T));

using F32 = Vec<float>;
using U16 = Vec<uint16_t>;
using I16 = Vec<int16_t>;
using U32 = Vec<uint32_t>;
using I32 = Vec<int32_t>;

// A memcpy of fixed size is one unaligned load or store.
template <class V>
UNICOMM_INLINE V load(const char* from) {
    V v;
    std::memcpy(&v, from, sizeof(V));
    return v;
}
template <class V>
UNICOMM_INLINE void store(char* to, V v) {
    std::memcpy(to, &v, sizeof(V));
}

// Calls f(0), f(1), ... f(kTimes - 1) with compile-time numbers. Arrays that only these index stay in
// registers, which the optimizer does not guarantee for a loop. The kernels are flattened, so neither this
// nor f is a call.
template <int kTimes, class F>
UNICOMM_INLINE void repeat(F f) {
    [&]<int... i>(std::integer_sequence<int, i...>) {
        (f(std::integral_constant<int, i>()), ...);
    }(std::make_integer_sequence<int, kTimes>());
}

// The same, but as a loop where there are more than registers for them, so that the code stays small.
template <int kTimes, class F>
UNICOMM_INLINE void for_each(F f) {
    if constexpr (kTimes <= 8) {
        repeat<kTimes>(f);
    } else {
#pragma GCC unroll 1
        for (int i = 0; i < kTimes; ++i) f(i);
    }
}

// Reads the first `bytes` < kVecBytes bytes of `from`, and zeros behind them.
UNICOMM_INLINE void load_part(char (&buffer)[kVecBytes], const char* from, int bytes) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    _mm512_storeu_si512(buffer, _mm512_maskz_loadu_epi8((uint64_t(1) << bytes) - 1, from));
#else
    store(buffer, U32{});
    std::memcpy(buffer, from, size_t(bytes));
#endif
}
UNICOMM_INLINE void store_part(char* to, const char (&buffer)[kVecBytes], int bytes) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    _mm512_mask_storeu_epi8(to, (uint64_t(1) << bytes) - 1, _mm512_loadu_si512(buffer));
#else
    std::memcpy(to, buffer, size_t(bytes));
#endif
}

}  // namespace
}  // namespace unicomm::UNICOMM_ISA
