// The loops of the wire formats. Compiled once per instruction set, with UNICOMM_ISA as its name.
#include <algorithm>
#include <array>
#include <bit>

#include "reduce/codec.hpp"
#include "reduce/simd.hpp"
#include "reduce/wire.hpp"

namespace unicomm::UNICOMM_ISA {
namespace {

constexpr int kWidth = kLanes<float>;
typedef uint16_t HalfU16 __attribute__((vector_size(kVecBytes / 2)));
typedef uint8_t QuarterU8 __attribute__((vector_size(kVecBytes / 4)));
typedef int8_t QuarterI8 __attribute__((vector_size(kVecBytes / 4)));

constexpr uint32_t kSign = 0x80000000u;
constexpr uint32_t kInfinite = 0x7f800000u;
constexpr uint32_t kNan = 0x7fc00000u;
constexpr int kNanScale = 255;

template <class To, class From>
UNICOMM_INLINE To converted(From v) {
    return __builtin_convertvector(v, To);
}

// The lower bytes of all words, which GCC 12 would take one by one.
UNICOMM_INLINE void store_bytes(char* to, U32 v) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to), _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)v));
#elif defined(__AVX2__)
    const __m256i lowest = _mm256_set1_epi32(0x0c080400);
    __m256i packed = _mm256_shuffle_epi8((__m256i)v, lowest);
    __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i_u*>(to), both);
#else
    store(to, converted<QuarterU8>(v));
#endif
}

// Bytes as words, with their sign or with zeros in front.
UNICOMM_INLINE U32 load_bytes(const char* from) {
#if defined(__AVX512F__)
    return (U32)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from)));
#elif defined(__AVX2__)
    return (U32)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i_u*>(from)));
#else
    return converted<U32>(load<QuarterU8>(from));
#endif
}
UNICOMM_INLINE I32 load_signed_bytes(const char* from) {
#if defined(__AVX512F__)
    return (I32)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from)));
#elif defined(__AVX2__)
    return (I32)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i_u*>(from)));
#else
    return converted<I32>(load<QuarterI8>(from));
#endif
}

// --- types of memory, in the order of their elements ------------------------------------------------------

struct InFloat32 {
    static constexpr int kBytes = 4;
    static UNICOMM_INLINE F32 load(const char* from) { return UNICOMM_ISA::load<F32>(from); }
    static UNICOMM_INLINE void store(char* to, F32 v) { UNICOMM_ISA::store(to, v); }
};

struct InBFloat16 {
    static constexpr int kBytes = 2;
    static UNICOMM_INLINE F32 load(const char* from) {
        return (F32)(converted<U32>(UNICOMM_ISA::load<HalfU16>(from)) << 16);
    }
    static UNICOMM_INLINE void store(char* to, F32 v) {
        U32 bits = (U32)v;
        U32 rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
        rounded = (I32)(bits & ~kSign) > int32_t(kInfinite) ? U32{} + (kNan >> 16) : rounded;
        UNICOMM_ISA::store(to, converted<HalfU16>(rounded));
    }
};

struct InFloat16 {
    static constexpr int kBytes = 2;
#if defined(__AVX512F__) && defined(__F16C__)
    // GCC 12 warns about its own header if the forms without a mask are used.
    static UNICOMM_INLINE F32 load(const char* from) {
        return (F32)_mm512_maskz_cvtph_ps(0xffff,
                                          _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(from)));
    }
    static UNICOMM_INLINE void store(char* to, F32 v) {
        __m256i halves = _mm512_maskz_cvtps_ph(0xffff, (__m512)v, kNearestEven);
        _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to), halves);
    }
    static constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#elif defined(__F16C__)
    static UNICOMM_INLINE F32 load(const char* from) {
        return (F32)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from)));
    }
    static UNICOMM_INLINE void store(char* to, F32 v) {
        _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to), _mm256_cvtps_ph((__m256)v, kNearestEven));
    }
    static constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#else
    using Codec = SmallFloat<5, 10, true, 0x7e00>;
    static UNICOMM_INLINE F32 load(const char* from) {
        return Codec::widen(converted<U32>(UNICOMM_ISA::load<HalfU16>(from)) << 16);
    }
    static UNICOMM_INLINE void store(char* to, F32 v) {
        UNICOMM_ISA::store(to, converted<HalfU16>(Codec::narrow(v)));
    }
#endif
};

// --- random bits ------------------------------------------------------------------------------------------

// Random bits of the elements from number `start` + `first` on: a hash of number and key. The multipliers and
// shifts are those of "lowbias32" by Chris Wellons (nullprogram.com, Prospecting for Hash Functions, 2018).
struct Random {
    Random(uint64_t key, int64_t start)
        : low(uint32_t(key)), high(uint32_t(key >> 32)), start(uint32_t(start)) {}

    UNICOMM_INLINE U32 bits(int64_t first) const {
        U32 number;
        for (int i = 0; i < kWidth; ++i) number[i] = uint32_t(i);
        U32 x = (number + (start + uint32_t(first))) ^ low;
        x ^= x >> 16;
        x *= 0x7feb352du;
        x ^= x >> 15;
        x += high;
        x *= 0x846ca68bu;
        x ^= x >> 16;
        return x;
    }

    uint32_t low, high, start;
};

// Sixteen random bits as a number from 0 up to 1.
UNICOMM_INLINE F32 fraction(U32 random) { return converted<F32>((I32)(random >> 16)) * 0x1p-16f; }

// --- elements of blocks -----------------------------------------------------------------------------------

// A format's element: scale() is the byte of a block's scale by the magnitude of its greatest element, as
// bits; kInverse and kFactor are what elements are multiplied by before they are encoded and after they are
// decoded, by that byte.

UNICOMM_INLINE int least_scale(uint32_t greatest, uint32_t carry, int back, int least, int most) {
    int scale = std::clamp(int((greatest + carry) >> 23) - back, least, most);
    return greatest >= kInfinite ? kNanScale : scale;
}

using Powers = std::array<float, 256>;

// 2^(sign * scale + add - 127) for each scale, as far as a float holds it; and NaN.
constexpr Powers powers(int sign, int add) {
    Powers found{};
    for (int scale = 0; scale < kNanScale; ++scale) {
        int biased = std::clamp(sign * scale + add, 0, 254);
        found[size_t(scale)] = std::bit_cast<float>(biased > 0 ? uint32_t(biased) << 23 : 0x400000u);
    }
    found[kNanScale] = std::bit_cast<float>(kNan);
    return found;
}

struct E4M3 {
    // 448 = 1.75 * 2^8
    static UNICOMM_INLINE int scale(uint32_t greatest) {
        return least_scale(greatest, 0x7fffff - 0x600000, 8, 0, 254);
    }
    static constexpr Powers kInverse = powers(-1, 254), kFactor = powers(1, 0);

    // Numbers of at most 448, into the lower bits of each word.
    template <bool kStochastic>
    static UNICOMM_INLINE U32 encode(F32 v, U32 random) {
        U32 bits = (U32)v, magnitude = bits & ~kSign, normal = magnitude - kRebias, subnormal;
        if constexpr (kStochastic) {
            normal += random >> (32 - kDropped);
            F32 steps = (F32)magnitude * 0x1p9f + fraction(random);
            // Those of normal numbers may be too large for an integer, and are not used.
            steps = steps < 8.0f ? steps : F32{} + 8.0f;
            subnormal = (U32)converted<I32>(steps);
        } else {
            normal += ((1u << (kDropped - 1)) - 1) + (magnitude >> kDropped & 1u);
            // The last place of this number is the smallest subnormal, so adding it rounds.
            constexpr uint32_t kRounder = (127 - 9 + 23) << 23;
            subnormal = (U32)((F32)magnitude + std::bit_cast<float>(kRounder)) - kRounder;
        }
        U32 code = (I32)magnitude < int32_t(kSmallestNormal) ? subnormal : normal >> kDropped;
        return code | (bits & kSign) >> 24;
    }

    static UNICOMM_INLINE F32 decode(const char* from) {
        U32 word = load_bytes(from);
        U32 magnitude = (word & 0x7fu) << kDropped;
        // A subnormal that is read with the implicit leading one is too large by exactly that one.
        F32 subnormal = (F32)(magnitude + kSmallestNormal) - std::bit_cast<float>(kSmallestNormal);
        U32 bits = (I32)magnitude < int32_t(1u << 23) ? (U32)subnormal
                                                      : magnitude + kRebias;  // 0x7f is never encoded
        return (F32)(bits | (word & 0x80u) << 24);
    }

  private:
    static constexpr int kDropped = 20;
    static constexpr uint32_t kRebias = (127 - 7) << 23;
    static constexpr uint32_t kSmallestNormal = kRebias + (1u << 23);
};

struct Int8 {
    // 127 / 64 = 1.984375. Numbers of at least 2^128 * 127 / 128 would need a scale of 2^128; they get 2^127
    // and become the greatest number.
    static UNICOMM_INLINE int scale(uint32_t greatest) {
        return least_scale(greatest, 0x7fffff - 0x7e0000, 0, 6, 254);
    }
    static constexpr Powers kInverse = powers(-1, 260), kFactor = powers(1, -6);

    template <bool kStochastic>
    static UNICOMM_INLINE U32 encode(F32 v, U32 random) {
        I32 whole;
        if constexpr (kStochastic) {
            // Positive, so that cutting off rounds down.
            whole = converted<I32>(v + fraction(random) + 128.0f) - 128;
        } else {
            // The last place of this number is 1, so adding it rounds.
            constexpr float kRounder = 0x1.8p23f;
            whole = (I32)(v + kRounder) - std::bit_cast<int32_t>(kRounder);
        }
        whole = whole > 127 ? I32{} + 127 : whole;
        return (U32)(whole < -127 ? I32{} - 127 : whole);
    }

    static UNICOMM_INLINE F32 decode(const char* from) { return converted<F32>(load_signed_bytes(from)); }
};

// Each lane with the one whose number differs in `kApart`.
template <int kApart, int... i>
UNICOMM_INLINE I32 greater_of(I32 v, std::integer_sequence<int, i...>) {
    I32 other = __builtin_shufflevector(v, v, (i ^ kApart)...);
    return v > other ? v : other;
}

UNICOMM_INLINE uint32_t greatest_lane(I32 v) {
#ifdef __AVX512F__
    return uint32_t(_mm512_reduce_max_epi32((__m512i)v));
#else
    if constexpr (kWidth >= 8) v = greater_of<4>(v, std::make_integer_sequence<int, kWidth>());
    v = greater_of<2>(v, std::make_integer_sequence<int, kWidth>());
    v = greater_of<1>(v, std::make_integer_sequence<int, kWidth>());
    return uint32_t(v[0]);
#endif
}

// Stores what encoding has lost of v; `back`: v as it will be decoded, times `given`.
UNICOMM_INLINE void keep(float* residual, F32 v, F32 back, float given) {
    if (given != 1.0f) back /= given;
    F32 lost = v - back;
    U32 finite = (U32)(((I32)lost & int32_t(~kSign)) < int32_t(kInfinite));
    store(reinterpret_cast<char*>(residual), (F32)((U32)lost & finite));
}

template <class Memory, bool kKeeps>
UNICOMM_INLINE F32 taken(const char* from, const float* residual) {
    F32 v = Memory::load(from);
    if constexpr (kKeeps) v += load<F32>(reinterpret_cast<const char*>(residual));
    return v;
}

// Encodes a whole block of elements, which are numbered from `first` on.
template <class Element, class Memory, int kBlock, bool kStochastic, bool kKeeps>
UNICOMM_INLINE void encode_block(const char* from, char* to, char* scale_to, float* residual, float given,
                                 const Random& random, int64_t first) {
    constexpr int kVectors = kBlock / kWidth;
    F32 v[kVectors];
    I32 greatest{};
    for_each<kVectors>([&](auto k) {
        v[k] = taken<Memory, kKeeps>(from + k * kWidth * Memory::kBytes,
                                     kKeeps ? residual + k * kWidth : nullptr);
        I32 magnitude = (I32)(v[k] * given) & int32_t(~kSign);
        greatest = magnitude > greatest ? magnitude : greatest;
    });
    int scale = Element::scale(greatest_lane(greatest));
    *scale_to = char(scale);
    if (scale == kNanScale) {
        std::memset(to, 0, kBlock);
        if constexpr (kKeeps) std::memset(residual, 0, kBlock * sizeof(float));
        return;
    }
    const float inverse = Element::kInverse[size_t(scale)], factor = Element::kFactor[size_t(scale)];
    for_each<kVectors>([&](auto k) {
        U32 bits{};
        if constexpr (kStochastic) bits = random.bits(first + k * kWidth);
        U32 code = Element::template encode<kStochastic>(v[k] * given * inverse, bits);
        store_bytes(to + k * kWidth, code);
        if constexpr (kKeeps) {
            keep(residual + k * kWidth, v[k], Element::decode(to + k * kWidth) * factor, given);
        }
    });
}

template <class Element, class Memory, int kBlock, bool kStochastic, bool kKeeps>
__attribute__((noinline, flatten)) void encode_blocks(const EncodeArguments& args) {
    const Random random(args.key, args.first);
    const float given = args.factor;
    char* scales = args.dst + args.count;
    // The last block, if it is not whole, is encoded within these, by the same code.
    char last[kBlock * Memory::kBytes] = {}, encoded[kBlock];
    float last_kept[kBlock] = {};
    for (int64_t at = 0; at < args.count; at += kBlock) {
        const char* from = args.src + at * Memory::kBytes;
        char* to = args.dst + at;
        float* residual = kKeeps ? args.residual + at : nullptr;
        auto rest = size_t(args.count - at);
        if (rest < kBlock) {
            std::memcpy(last, std::exchange(from, last), rest * Memory::kBytes);
            to = encoded;
            if constexpr (kKeeps) std::memcpy(last_kept, std::exchange(residual, last_kept), rest * 4);
        }
        encode_block<Element, Memory, kBlock, kStochastic, kKeeps>(from, to, scales++, residual, given,
                                                                   random, at);
        if (rest < kBlock) {
            std::memcpy(args.dst + at, encoded, rest);
            if constexpr (kKeeps) std::memcpy(args.residual + at, last_kept, rest * 4);
        }
    }
}

template <class Memory, bool kAdds>
UNICOMM_INLINE void put(char* to, F32 v) {
    if constexpr (kAdds) v = Memory::load(to) + v;
    Memory::store(to, v);
}

template <class Element, class Memory, int kBlock, bool kAdds>
UNICOMM_INLINE void decode_block(const char* from, uint8_t scale, char* to) {
    const float factor = Element::kFactor[scale];
    for_each<kBlock / kWidth>([&](auto k) {
        F32 v = Element::decode(from + k * kWidth) * factor;
        put<Memory, kAdds>(to + k * kWidth * Memory::kBytes, v);
    });
}

template <class Element, class Memory, int kBlock, bool kAdds>
__attribute__((noinline, flatten)) void decode_blocks(const DecodeArguments& args) {
    const char* scales = args.src + args.count;
    // The last block, if it is not whole, is decoded within these, by the same code.
    char last[kBlock] = {}, decoded[kBlock * Memory::kBytes] = {};
    for (int64_t at = 0; at < args.count; at += kBlock) {
        const char* from = args.src + at;
        char* to = args.dst + at * Memory::kBytes;
        auto rest = size_t(args.count - at);
        if (rest < kBlock) {
            std::memcpy(last, std::exchange(from, last), rest);
            if constexpr (kAdds) std::memcpy(decoded, to, rest * Memory::kBytes);
            to = decoded;
        }
        decode_block<Element, Memory, kBlock, kAdds>(from, uint8_t(*scales++), to);
        if (rest < kBlock) std::memcpy(args.dst + at * Memory::kBytes, decoded, rest * Memory::kBytes);
    }
}

// --- bfloat16 ---------------------------------------------------------------------------------------------

template <class Memory, bool kStochastic, bool kKeeps>
UNICOMM_INLINE void encode_halves(const char* from, char* to, float* residual, float given,
                                  const Random& random, int64_t first) {
    F32 taken_in = taken<Memory, kKeeps>(from, residual), v = taken_in * given;
    if constexpr (kStochastic) {
        U32 bits = (U32)v, magnitude = bits & ~kSign;
        U32 rounded = (bits + (random.bits(first) >> 16)) & 0xffff0000u;
        rounded = (I32)magnitude < int32_t(kInfinite) ? rounded : bits;
        v = (F32)rounded;
    }
    InBFloat16::store(to, v);
    if constexpr (kKeeps) keep(residual, taken_in, InBFloat16::load(to), given);
}

template <class Memory, bool kStochastic, bool kKeeps>
__attribute__((noinline, flatten)) void encode_bfloat16(const EncodeArguments& args) {
    const Random random(args.key, args.first);
    const float given = args.factor;
    float* residual = args.residual;
    int64_t at = 0;
    for (; at + kWidth <= args.count; at += kWidth) {
        encode_halves<Memory, kStochastic, kKeeps>(args.src + at * Memory::kBytes, args.dst + at * 2,
                                                   kKeeps ? residual + at : nullptr, given, random, at);
    }
    if (auto rest = size_t(args.count - at); rest > 0) {
        char from[kWidth * Memory::kBytes] = {}, to[kWidth * 2];
        float kept[kWidth] = {};
        std::memcpy(from, args.src + at * Memory::kBytes, rest * Memory::kBytes);
        if constexpr (kKeeps) std::memcpy(kept, residual + at, rest * sizeof(float));
        encode_halves<Memory, kStochastic, kKeeps>(from, to, kept, given, random, at);
        std::memcpy(args.dst + at * 2, to, rest * 2);
        if constexpr (kKeeps) std::memcpy(residual + at, kept, rest * sizeof(float));
    }
}

template <class From, class To, bool kAdds>
__attribute__((noinline, flatten)) void convert(const char* given_from, char* given_to, int64_t count) {
    int64_t at = 0;
    for (; at + kWidth <= count; at += kWidth) {
        put<To, kAdds>(given_to + at * To::kBytes, From::load(given_from + at * From::kBytes));
    }
    if (int64_t rest = count - at; rest > 0) {
        char from[kWidth * From::kBytes] = {}, to[kWidth * To::kBytes] = {};
        std::memcpy(from, given_from + at * From::kBytes, size_t(rest * From::kBytes));
        if constexpr (kAdds) std::memcpy(to, given_to + at * To::kBytes, size_t(rest * To::kBytes));
        put<To, kAdds>(to, From::load(from));
        std::memcpy(given_to + at * To::kBytes, to, size_t(rest * To::kBytes));
    }
}

template <class Memory>
void convert_any(Conversion how, const char* from, char* to, int64_t count) {
    switch (how) {
        case Conversion::kWiden:
            return convert<Memory, InFloat32, false>(from, to, count);
        case Conversion::kAdd:
            return convert<Memory, InFloat32, true>(from, to, count);
        default:
            return convert<InFloat32, Memory, false>(from, to, count);
    }
}

// --- which of them ----------------------------------------------------------------------------------------

template <class Memory, bool kStochastic, bool kKeeps>
void encode_from(WireFormat format, const EncodeArguments& args) {
    switch (format) {
        case WireFormat::kInt8:
            return encode_blocks<Int8, Memory, kShortBlock, kStochastic, kKeeps>(args);
        case WireFormat::kMxfp8:
            return encode_blocks<E4M3, Memory, kShortBlock, kStochastic, kKeeps>(args);
        case WireFormat::kFloat8E4M3:
            return encode_blocks<E4M3, Memory, kLongBlock, kStochastic, kKeeps>(args);
        default:
            return encode_bfloat16<Memory, kStochastic, kKeeps>(args);
    }
}

template <class Memory, bool kAdds>
void decode_to(WireFormat format, const DecodeArguments& args) {
    switch (format) {
        case WireFormat::kInt8:
            return decode_blocks<Int8, Memory, kShortBlock, kAdds>(args);
        case WireFormat::kMxfp8:
            return decode_blocks<E4M3, Memory, kShortBlock, kAdds>(args);
        case WireFormat::kFloat8E4M3:
            return decode_blocks<E4M3, Memory, kLongBlock, kAdds>(args);
        default:
            return convert<InBFloat16, Memory, kAdds>(args.src, args.dst, args.count);
    }
}

template <class Memory>
void encode_any(WireFormat format, const EncodeArguments& args) {
    if (args.stochastic) {
        args.residual ? encode_from<Memory, true, true>(format, args)
                      : encode_from<Memory, true, false>(format, args);
    } else {
        args.residual ? encode_from<Memory, false, true>(format, args)
                      : encode_from<Memory, false, false>(format, args);
    }
}

}  // namespace

void encode(DType dtype, WireFormat format, const EncodeArguments& args) {
    if (dtype == DType::kFloat32) return encode_any<InFloat32>(format, args);
    if (dtype == DType::kFloat16) return encode_any<InFloat16>(format, args);
    encode_any<InBFloat16>(format, args);
}

void decode(DType dtype, WireFormat format, const DecodeArguments& args) {
    if (dtype == DType::kFloat16) return decode_to<InFloat16, false>(format, args);
    if (dtype == DType::kBFloat16) return decode_to<InBFloat16, false>(format, args);
    args.adds ? decode_to<InFloat32, true>(format, args) : decode_to<InFloat32, false>(format, args);
}

void convert(DType dtype, Conversion how, const char* from, char* to, int64_t count) {
    if (dtype == DType::kFloat16) return convert_any<InFloat16>(how, from, to, count);
    convert_any<InBFloat16>(how, from, to, count);
}

}  // namespace unicomm::UNICOMM_ISA
