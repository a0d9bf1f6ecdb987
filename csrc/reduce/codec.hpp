// Codecs: how a vector's worth of memory becomes lanes that can be reduced, and back.
//
// A codec defines the type of the lanes, `Lane`, and the number of vectors, `kParts`, that kVecBytes bytes of
// memory fill. A fold does not depend on which element is in which lane, only load() and store() have to
// agree; narrow floats use that to shift instead of shuffle.
#pragma once
#include <type_traits>

#include "reduce/simd.hpp"

namespace unicomm::UNICOMM_ISA {
namespace {

// Types that accumulate in themselves: float32, float64 and the integers.
template <class T>
struct Native {
    using Lane = T;
    static constexpr int kParts = 1;

    static UNICOMM_INLINE void load(const char* from, Vec<T>* part) {
        part[0] = UNICOMM_ISA::load<Vec<T>>(from);
    }
    static UNICOMM_INLINE void store(char* to, const Vec<T>* part) { UNICOMM_ISA::store(to, part[0]); }
};

// bool: any nonzero byte is true. Lanes are all ones or all zeros.
struct Truth {
    using Lane = uint8_t;
    static constexpr int kParts = 1;

    static UNICOMM_INLINE void load(const char* from, Vec<uint8_t>* part) {
        part[0] = (Vec<uint8_t>)(UNICOMM_ISA::load<Vec<uint8_t>>(from) != 0);
    }
    static UNICOMM_INLINE void store(char* to, const Vec<uint8_t>* part) {
        UNICOMM_ISA::store(to, part[0] & 1);
    }
};

// The upper half of a float32.
struct BFloat16 {
    using Lane = float;
    static constexpr int kParts = 2;

    static UNICOMM_INLINE void load(const char* from, F32* part) {
        U32 pair = UNICOMM_ISA::load<U32>(from);
        part[0] = (F32)(pair << 16);
        part[1] = (F32)(pair & 0xffff0000u);
    }
    // Rounds both halves at once, as 16-bit words. NaNs from such sources, and from the factors of fold(),
    // have only zeros in the part that is cut off, so rounding cannot turn them into infinity.
    static UNICOMM_INLINE void store(char* to, const F32* part) {
        U32 low = (U32)part[0], high = (U32)part[1];
#if defined(__AVX2__) && !defined(__AVX512BW__)
        U16 kept = (U16)_mm256_blend_epi16((__m256i)(low >> 16), (__m256i)high, 0xaa);
        U16 cut = (U16)_mm256_blend_epi16((__m256i)low, (__m256i)(high << 16), 0xaa);
#else
        U16 kept = (U16)(low >> 16 | (high & 0xffff0000u));
        U16 cut = (U16)((low & 0xffffu) | high << 16);
#endif
        // Rounds up above one half, and at exactly one half if the kept bit is odd.
        cut |= kept & 1;
#ifdef __AVX512BW__
        kept = cut > 0x8000 ? kept + 1 : kept;
#else
        kept -= (U16)((I16)(cut ^ 0x8000) > 0);  // most processors only compare signed words
#endif
        UNICOMM_ISA::store(to, kept);
    }
};

// Floats of 1 + kExponent + kMantissa bits, by integer arithmetic, without tables or denormal operands (which
// are lost in a thread that flushes denormals). kInfinite: the largest exponent means infinity and NaN, as in
// IEEE 754. Otherwise it is an ordinary exponent, only the all-ones pattern is NaN, and values that are too
// large, also infinity, become the largest number.
template <int kExponent, int kMantissa, bool kInfinite, uint32_t kNan>
struct SmallFloat {
    static constexpr int kBits = 1 + kExponent + kMantissa;
    using Lane = float;
    static constexpr int kParts = 32 / kBits;

    static UNICOMM_INLINE void load(const char* from, F32* part) {
        U32 word = UNICOMM_ISA::load<U32>(from);
        repeat<kParts>([&](auto k) { part[k] = widen(word << (32 - kBits * (k + 1))); });
    }
    static UNICOMM_INLINE void store(char* to, const F32* part) {
        U32 word{};
        repeat<kParts>([&](auto k) { word |= narrow(part[k]) << (kBits * k); });
        UNICOMM_ISA::store(to, word);
    }

    // Takes the element from the upper bits of each word.
    static UNICOMM_INLINE F32 widen(U32 word) {
        U32 magnitude = (word & ~kSign & ~((1u << (32 - kBits)) - 1)) >> (8 - kExponent);
        U32 bits = magnitude + kRebias;
        if constexpr (kInfinite) {
            bits = (I32)magnitude >= int32_t(kTop << 23) ? bits + kRebias : bits;
        } else {
            constexpr uint32_t kAllOnes = ((1u << (kExponent + kMantissa)) - 1) << kDropped;
            bits = magnitude == kAllOnes ? U32{} + 0x7fc00000u : bits;
        }
        // A subnormal that is read with the implicit leading one is too large by exactly that one.
        F32 subnormal = (F32)(magnitude + kSmallestNormal) - __builtin_bit_cast(float, kSmallestNormal);
        bits = (I32)magnitude < int32_t(1u << 23) ? (U32)subnormal : bits;
        return (F32)(bits | (word & kSign));
    }

    // Leaves the element in the lower bits of each word.
    static UNICOMM_INLINE U32 narrow(F32 v) {
        U32 bits = (U32)v, magnitude = bits & ~kSign;
        U32 normal =
            (magnitude - kRebias + ((1u << (kDropped - 1)) - 1) + (magnitude >> kDropped & 1u)) >> kDropped;
        // The last place of kRounder is the smallest subnormal, so adding it rounds.
        constexpr uint32_t kRounder = (127 + 1 - kBias - kMantissa + 23) << 23;
        U32 subnormal = (U32)((F32)magnitude + __builtin_bit_cast(float, kRounder)) - kRounder;
        U32 small = (I32)magnitude < int32_t(kSmallestNormal) ? subnormal : normal;
        constexpr uint32_t kOverflow = kInfinite ? kTop << kMantissa : kNan - 1;
        constexpr uint32_t kTooLarge =
            kInfinite ? (kTop + 127 - kBias) << 23 : kRebias + (kOverflow << kDropped);
        U32 large = (I32)magnitude > 0x7f800000 ? U32{} + kNan : U32{} + kOverflow;
        small = (I32)magnitude >= int32_t(kTooLarge) ? large : small;
        return small | (bits & kSign) >> (32 - kBits);
    }

  private:
    static constexpr uint32_t kSign = 0x80000000u;
    static constexpr int kDropped = 23 - kMantissa;
    static constexpr uint32_t kTop = (1u << kExponent) - 1;  // largest exponent
    static constexpr uint32_t kBias = kTop / 2;
    static constexpr uint32_t kRebias = (127 - kBias) << 23;
    static constexpr uint32_t kSmallestNormal = kRebias + (1u << 23);
};

using Float8E4M3 = SmallFloat<4, 3, false, 0x7f>;
using Float8E5M2 = SmallFloat<5, 2, true, 0x7f>;

#ifdef __F16C__
// By the processor's conversions, which also work in a thread that flushes denormals.
struct Float16 {
    using Lane = float;
    static constexpr int kParts = 2;

    static UNICOMM_INLINE void load(const char* from, F32* part) {
        part[0] = widen(from);
        part[1] = widen(from + kVecBytes / 2);
    }
    static UNICOMM_INLINE void store(char* to, const F32* part) {
        narrow(to, part[0]);
        narrow(to + kVecBytes / 2, part[1]);
    }

  private:
    static constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#ifdef __AVX512F__
    // GCC 12 warns about its own header if the forms without a mask are used.
    static constexpr __mmask16 kAll = 0xffff;
    static UNICOMM_INLINE F32 widen(const char* from) {
        return (F32)_mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(from)));
    }
    static UNICOMM_INLINE void narrow(char* to, F32 v) {
        __m256i halves = _mm512_maskz_cvtps_ph(kAll, (__m512)v, kNearestEven);
        _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to), halves);
    }
#else
    static UNICOMM_INLINE F32 widen(const char* from) {
        return (F32)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from)));
    }
    static UNICOMM_INLINE void narrow(char* to, F32 v) {
        _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to), _mm256_cvtps_ph((__m256)v, kNearestEven));
    }
#endif
};
#else
using Float16 = SmallFloat<5, 10, true, 0x7e00>;
#endif

}  // namespace
}  // namespace unicomm::UNICOMM_ISA
