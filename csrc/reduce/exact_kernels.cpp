// The loops of the reproducible sums. Compiled once per instruction set, with UNICOMM_ISA as its name.
#include <bit>
#include <limits>

#include "reduce/codec.hpp"
#include "reduce/exact.hpp"
#include "reduce/simd.hpp"

namespace unicomm::UNICOMM_ISA {
namespace {

using F64 = Vec<double>;
using U64 = Vec<uint64_t>;
using I64 = Vec<int64_t>;
typedef float HalfF32 __attribute__((vector_size(kVecBytes / 2)));
typedef int32_t HalfI32 __attribute__((vector_size(kVecBytes / 2)));

// The number of bits behind the leading one of each element, and the largest number of sources whose sum a
// float64 holds whatever they are (0: there is none).
template <class Codec>
constexpr int kFraction = 23;
template <>
constexpr int kFraction<BFloat16> = 7;
template <>
constexpr int kFraction<Float16> = 10;
template <class Codec>
constexpr int kAlwaysExact = 0;
template <>
constexpr int kAlwaysExact<Float16> = 1 << 13;  // 2^13 times 2^16 in steps of 2^-24: 53 bits

template <class V>
UNICOMM_INLINE bool any(V mask) {
#if defined(__AVX512BW__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
    uint64_t words[kVecBytes / 8], all = 0;
    std::memcpy(words, &mask, sizeof(mask));
    for (uint64_t word : words) all |= word;
    return all != 0;
#endif
}

template <class V>
UNICOMM_INLINE V nan_made_alike(V v) {
    using T = std::remove_reference_t<decltype(v[0])>;
    return v == v ? v : V{} + std::numeric_limits<T>::quiet_NaN();
}

UNICOMM_INLINE void widen(F32 v, F64* two) {
    HalfF32 half[2];
    std::memcpy(half, &v, sizeof(v));
    two[0] = __builtin_convertvector(half[0], F64);
    two[1] = __builtin_convertvector(half[1], F64);
}

UNICOMM_INLINE F32 join(HalfF32 low, HalfF32 high) {
    F32 v;
    std::memcpy(&v, &low, sizeof(low));
    std::memcpy(reinterpret_cast<char*>(&v) + sizeof(low), &high, sizeof(high));
    return v;
}

// Rounds to odd: to that neighbour of v whose last bit is set, unless v is a float32.
UNICOMM_INLINE HalfF32 to_odd(F64 v) {
    HalfF32 near = __builtin_convertvector(v, HalfF32);
    F64 back = __builtin_convertvector(near, F64);
    constexpr uint64_t kSign = uint64_t(1) << 63;
    I64 too_large = (I64)(((U64)back & ~kSign) > ((U64)v & ~kSign));
    HalfI32 inexact = __builtin_convertvector((I64)(back != v), HalfI32);
    HalfI32 bits = (HalfI32)near;
    HalfI32 step = __builtin_convertvector(too_large, HalfI32) | 1;  // -1 or 1
    return (HalfF32)(bits + (step & inexact & ((bits & 1) - 1)));
}

// Rounds to odd the sum of two, of which |lo| is at most half a unit in the last place of `hi`.
UNICOMM_INLINE F64 to_odd(F64 hi, F64 lo) {
    I64 bits = (I64)hi;
    I64 step = ((I64)((bits ^ (I64)lo) < 0)) | 1;  // towards zero if the signs differ
    return (F64)(bits + (step & (I64)(lo != 0) & ((bits & 1) - 1)));
}

// a + b = s + error, exactly.
UNICOMM_INLINE void two_sum(F64 a, F64 b, F64& s, F64& error) {
    s = a + b;
    F64 part = s - a;
    error = (a - (s - part)) + (b - part);
}

UNICOMM_INLINE F64 load_source(const FoldArguments& args, int k, int64_t at, int bytes) {
    char buffer[kVecBytes];
    if (bytes == kVecBytes) return load<F64>(args.srcs[k] + at);
    load_part(buffer, args.srcs[k] + at, bytes);
    return load<F64>(buffer);
}

template <class Codec>
UNICOMM_INLINE void load_source(const FoldArguments& args, int k, int64_t at, int bytes, F32* parts) {
    char buffer[kVecBytes];
    if (bytes == kVecBytes) return Codec::load(args.srcs[k] + at, parts);
    load_part(buffer, args.srcs[k] + at, bytes);
    Codec::load(buffer, parts);
}

UNICOMM_INLINE void store_result(const FoldArguments& args, int64_t at, int bytes, const char* buffer) {
    if (bytes == kVecBytes) {
        std::memcpy(args.dst + at, buffer, kVecBytes);
    } else {
        std::memcpy(args.dst + at, buffer, size_t(bytes));
    }
}

// Sums of float64 in two parts. `sum` becomes the nearest float64 and `rest` what it lacks; `inexact` marks
// the lanes where they are not the sum, as a third part would have been needed, or numbers are not finite.
class TwoParts {
  public:
    UNICOMM_INLINE void add(F64 x) {
        F64 error, lost;
        two_sum(sum, x, sum, error);
        two_sum(rest, error, rest, lost);
        inexact |= (I64)(lost != 0);  // also if it is NaN
    }
    UNICOMM_INLINE void normalize() {
        F64 whole, error;
        two_sum(sum, rest, whole, error);
        I64 two = (I64)(rest != 0);  // else the sum keeps the sign of a zero
        sum = (F64)(((I64)whole & two) | ((I64)sum & ~two));
        rest = error;
        inexact |= (I64)(error != error);
    }
    F64 sum, rest = F64{};
    I64 inexact = I64{};
};

UNICOMM_INLINE F64 divided(F64 total, const FoldArguments& args) {
    auto n = static_cast<unsigned>(args.divisor);
    // The same number, as long as it is no subnormal one.
    if (std::has_single_bit(n) && n <= 1u << 16) return total * (1.0 / double(n));
    return total / double(n);
}

// --- float16, bfloat16 and float32 --------------------------------------------------------------------

template <class Codec, bool kAverage>
UNICOMM_INLINE void finish(const FoldArguments& args, int64_t at, int bytes, F64* sums) {
    constexpr int kParts = Codec::kParts;
    F32 parts[kParts];
    repeat<kParts>([&](auto p) {
        F64* two = sums + 2 * p;
        if constexpr (kAverage) two[0] = divided(two[0], args), two[1] = divided(two[1], args);
        if constexpr (std::is_same_v<Codec, Native<float>>) {
            parts[p] =
                join(__builtin_convertvector(two[0], HalfF32), __builtin_convertvector(two[1], HalfF32));
        } else {
            parts[p] = join(to_odd(two[0]), to_odd(two[1]));
        }
        parts[p] = nan_made_alike(parts[p]);
    });
    if (bytes == kVecBytes) return Codec::store(args.dst + at, parts);
    char buffer[kVecBytes];
    Codec::store(buffer, parts);
    store_result(args, at, bytes, buffer);
}

// The sum of one lane, exactly.
template <class Codec>
__attribute__((noinline)) double one_lane(const FoldArguments& args, int64_t at, int bytes, int lane,
                                          bool average) {
    constexpr int kParts = Codec::kParts, kPerPart = kLanes<float>;
    ExactSum sum;
    for (int k = 0; k < args.n; ++k) {
        F32 parts[kParts];
        load_source<Codec>(args, k, at, bytes, parts);
        float numbers[kParts * kPerPart];
        std::memcpy(numbers, parts, sizeof(numbers));
        sum.add(double(numbers[lane]));
    }
    return average ? sum.nearest() : sum.odd();
}

// A vector of elements of which some need more than one float64.
template <class Codec, bool kAverage>
__attribute__((noinline)) void wide_step(const FoldArguments& args, int64_t at, int bytes) {
    constexpr int kParts = Codec::kParts, kSums = 2 * kParts;
    TwoParts total[kSums];
    for (int k = 0; k < args.n; ++k) {
        F32 parts[kParts];
        F64 x[kSums];
        load_source<Codec>(args, k, at, bytes, parts);
        for (int p = 0; p < kParts; ++p) widen(parts[p], x + 2 * p);
        for (int s = 0; s < kSums; ++s) {
            if (k == 0) {
                total[s].sum = x[s];
            } else {
                total[s].add(x[s]);
            }
        }
    }
    F64 sums[kSums];
    for (int s = 0; s < kSums; ++s) {
        TwoParts& t = total[s];
        t.normalize();
        sums[s] = kAverage ? t.sum : to_odd(t.sum, t.rest);
        for (int i = 0; any(t.inexact) && i < kLanes<double>; ++i) {
            if (t.inexact[i]) sums[s][i] = one_lane<Codec>(args, at, bytes, s * kLanes<double> + i, kAverage);
        }
    }
    finish<Codec, kAverage>(args, at, bytes, sums);
}

template <class Codec, bool kAverage>
UNICOMM_INLINE void step(const FoldArguments& args, int64_t at, int bytes, int32_t most_apart) {
    constexpr int kParts = Codec::kParts;
    constexpr bool kLooks = kAlwaysExact<Codec> == 0;
    F64 sums[2 * kParts];
    U32 largest[kParts], least[kParts];
    auto read = [&](int k, auto&& take) {
        F32 parts[kParts];
        load_source<Codec>(args, k, at, bytes, parts);
        repeat<kParts>([&](auto p) {
            F64 two[2];
            widen(parts[p], two);
            U32 magnitude = (U32)parts[p] & 0x7fffffffu;
            take(p, two, magnitude, magnitude - 1);  // zeros have no exponent: they become the largest number
        });
    };
    read(0, [&](auto p, F64* two, U32 magnitude, U32 less) {
        sums[2 * p] = two[0], sums[2 * p + 1] = two[1];
        if constexpr (kLooks) largest[p] = magnitude, least[p] = less;
    });
    for (int k = 1; k < args.n; ++k) {
        read(k, [&](auto p, F64* two, U32 magnitude, U32 less) {
            sums[2 * p] += two[0], sums[2 * p + 1] += two[1];
            if constexpr (kLooks) {
                largest[p] = magnitude > largest[p] ? magnitude : largest[p];
                least[p] = less < least[p] ? less : least[p];
            }
        });
    }
    if constexpr (kLooks) {
        I32 wide{};
        repeat<kParts>([&](auto p) {
            I32 apart = (I32)(largest[p] >> 23) - (I32)(least[p] >> 23);
            // What is not finite stays so in any order.
            wide |= (I32)(apart > most_apart) & (I32)((I32)largest[p] < 0x7f800000);
        });
        if (any(wide)) return wide_step<Codec, kAverage>(args, at, bytes);
    }
    finish<Codec, kAverage>(args, at, bytes, sums);
}

template <class Codec, bool kAverage>
__attribute__((noinline, flatten)) void kernel(const FoldArguments& given) {
    const FoldArguments args = given;  // stays in registers while dst is written
    int64_t at = 0;
    if (kAlwaysExact<Codec> && args.n > kAlwaysExact<Codec>) {
        for (; at + kVecBytes <= args.bytes; at += kVecBytes) wide_step<Codec, kAverage>(args, at, kVecBytes);
        if (at < args.bytes) wide_step<Codec, kAverage>(args, at, int(args.bytes - at));
        return;
    }
    // n numbers below 2^(E+1) in steps of 2^(e-fraction) have sums of at most 53 bits.
    const int32_t most_apart = 52 - kFraction<Codec> - std::bit_width(unsigned(args.n - 1));
    for (; at + kVecBytes <= args.bytes; at += kVecBytes)
        step<Codec, kAverage>(args, at, kVecBytes, most_apart);
    if (at < args.bytes) step<Codec, kAverage>(args, at, int(args.bytes - at), most_apart);
}

// Two sources: one addition. That rounds once for float32 and float64. Narrower types are added in float32
// and rounded again; as that has more than twice their bits and one, the result is that of one rounding
// (Figueroa, When Is Double Rounding Innocuous?, SIGNUM Newsletter 30, 1995), also for subnormal sums, which
// float32 has exactly. For an average, elements of narrow types are halved first, exactly.
template <class Codec, bool kAverage>
__attribute__((noinline, flatten)) void pair_kernel(const FoldArguments& given) {
    const FoldArguments args = given;
    constexpr int kParts = Codec::kParts;
    using Lanes = Vec<typename Codec::Lane>;
    int64_t at = 0;
    auto step = [&](char* to, const char* a, const char* b) {
        Lanes parts[kParts], others[kParts];
        Codec::load(a, parts);
        Codec::load(b, others);
        repeat<kParts>([&](auto p) {
            constexpr auto kShare = static_cast<typename Codec::Lane>(kAverage ? 0.5 : 1.0);
            parts[p] = nan_made_alike(parts[p] * kShare + others[p] * kShare);
        });
        Codec::store(to, parts);
    };
    for (; at + kVecBytes <= args.bytes; at += kVecBytes) {
        step(args.dst + at, args.srcs[0] + at, args.srcs[1] + at);
    }
    if (at < args.bytes) {
        char a[kVecBytes], b[kVecBytes];
        int rest = int(args.bytes - at);
        load_part(a, args.srcs[0] + at, rest);
        load_part(b, args.srcs[1] + at, rest);
        step(a, a, b);
        store_part(args.dst + at, a, rest);
    }
}

// --- float64 ----------------------------------------------------------------------------------------------

__attribute__((noinline)) double one_lane64(const FoldArguments& args, int64_t at, int bytes, int lane) {
    ExactSum sum;
    for (int k = 0; k < args.n; ++k) sum.add(load_source(args, k, at, bytes)[lane]);
    return sum.nearest();
}

template <bool kAverage>
UNICOMM_INLINE void step64(const FoldArguments& args, int64_t at, int bytes) {
    TwoParts total;
    total.sum = load_source(args, 0, at, bytes);
    for (int k = 1; k < args.n; ++k) total.add(load_source(args, k, at, bytes));
    total.normalize();
    if (any(total.inexact)) {
        for (int i = 0; i < kLanes<double>; ++i) {
            if (total.inexact[i]) total.sum[i] = one_lane64(args, at, bytes, i);
        }
    }
    if constexpr (kAverage) total.sum = total.sum / double(args.divisor);
    total.sum = nan_made_alike(total.sum);
    if (bytes == kVecBytes) return store(args.dst + at, total.sum);
    char buffer[kVecBytes];
    store(buffer, total.sum);
    store_result(args, at, bytes, buffer);
}

template <bool kAverage>
__attribute__((noinline)) void kernel64(const FoldArguments& given) {
    const FoldArguments args = given;
    int64_t at = 0;
    for (; at + kVecBytes <= args.bytes; at += kVecBytes) step64<kAverage>(args, at, kVecBytes);
    if (at < args.bytes) step64<kAverage>(args, at, int(args.bytes - at));
}

template <bool kAverage>
void run_dtype(DType dtype, const FoldArguments& args) {
    const bool halves = !kAverage || args.divisor == 2;
    switch (dtype) {
        case DType::kFloat64:
            if (!kAverage && args.n == 2) return pair_kernel<Native<double>, false>(args);
            return kernel64<kAverage>(args);
        case DType::kFloat32:
            if (!kAverage && args.n == 2) return pair_kernel<Native<float>, false>(args);
            return kernel<Native<float>, kAverage>(args);
        case DType::kFloat16:
            if (args.n == 2 && halves) return pair_kernel<Float16, kAverage>(args);
            return kernel<Float16, kAverage>(args);
        case DType::kBFloat16:
            if (args.n == 2 && halves) return pair_kernel<BFloat16, kAverage>(args);
            return kernel<BFloat16, kAverage>(args);
        default:
            return;
    }
}

}  // namespace

void run_exact(DType dtype, Red red, const FoldArguments& args) {
    red == Red::kReproducibleAvg ? run_dtype<true>(dtype, args) : run_dtype<false>(dtype, args);
}

}  // namespace unicomm::UNICOMM_ISA
