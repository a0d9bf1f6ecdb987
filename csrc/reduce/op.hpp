// The operations on vectors of lanes: source() prepares what one source contributes, combine() folds it in,
// result() finishes the accumulator.
#pragma once
#include <type_traits>

#include "reduce/arguments.hpp"
#include "reduce/simd.hpp"

namespace unicomm::UNICOMM_ISA {
namespace {

template <class T>
struct Plain {
    static UNICOMM_INLINE Vec<T> source(Vec<T> x, const FoldArguments&, int) { return x; }
    static UNICOMM_INLINE Vec<T> result(Vec<T> acc, const FoldArguments&) { return acc; }
};

template <class T>
struct Sum : Plain<T> {
    static UNICOMM_INLINE Vec<T> combine(Vec<T> acc, Vec<T> x) {
        if constexpr (std::is_integral_v<T>) {
            using Wrapping = Vec<std::make_unsigned_t<T>>;
            return (Vec<T>)((Wrapping)acc + (Wrapping)x);
        } else {
#ifdef __AVX512F__
            // x * 1 is exact, so the result has the bits of the sum. Some processors add in the unit that
            // also converts float16, but multiply in another: this uses both.
            if constexpr (std::is_same_v<T, float>) {
                return (Vec<T>)_mm512_fmadd_ps((__m512)x, _mm512_set1_ps(1.0f), (__m512)acc);
            }
#endif
            return acc + x;
        }
    }
};

template <class T>
struct Product : Plain<T> {
    static_assert(!std::is_signed_v<T> || std::is_floating_point_v<T>, "signed integers would overflow");
    static UNICOMM_INLINE Vec<T> combine(Vec<T> acc, Vec<T> x) { return acc * x; }
};

// A NaN in the accumulator stays, because it compares false; a NaN in x is taken. Of equal values the
// accumulator stays.
template <class T>
struct Min : Plain<T> {
    static UNICOMM_INLINE Vec<T> combine(Vec<T> acc, Vec<T> x) {
        Vec<T> least = x < acc ? x : acc;
        if constexpr (std::is_floating_point_v<T>) return x == x ? least : x;
        return least;
    }
};

template <class T>
struct Max : Plain<T> {
    static UNICOMM_INLINE Vec<T> combine(Vec<T> acc, Vec<T> x) {
        Vec<T> greatest = x > acc ? x : acc;
        if constexpr (std::is_floating_point_v<T>) return x == x ? greatest : x;
        return greatest;
    }
};

template <class T>
struct And : Plain<T> {
    static UNICOMM_INLINE Vec<T> combine(Vec<T> acc, Vec<T> x) { return acc & x; }
};
template <class T>
struct Or : Plain<T> {
    static UNICOMM_INLINE Vec<T> combine(Vec<T> acc, Vec<T> x) { return acc | x; }
};
template <class T>
struct Xor : Plain<T> {
    static UNICOMM_INLINE Vec<T> combine(Vec<T> acc, Vec<T> x) { return acc ^ x; }
};

template <class T>
struct PremulSum : Sum<T> {
    static UNICOMM_INLINE Vec<T> source(Vec<T> x, const FoldArguments& args, int k) {
        if constexpr (std::is_same_v<T, float>) {
            return x * args.factors[k].f32;
        } else if constexpr (std::is_same_v<T, double>) {
            return x * args.factors[k].f64;
        } else {
            static_assert(std::is_unsigned_v<T>);
            return x * static_cast<T>(args.factors[k].integer);
        }
    }
};

template <class T>
struct Avg : Sum<T> {
    static UNICOMM_INLINE Vec<T> result(Vec<T> acc, const FoldArguments& args) {
        if constexpr (std::is_floating_point_v<T>) {
            return acc / static_cast<T>(args.divisor);
        } else {
            T lane[kLanes<T>];
            std::memcpy(lane, &acc, sizeof(acc));
            for (T& x : lane) x = quotient(x, args.divisor);
            return load<Vec<T>>(reinterpret_cast<const char*>(lane));
        }
    }

  private:
    // Vectors can divide doubles but not integers. With 53 bits the quotient of two 32-bit integers never
    // rounds up to the next integer, so truncating it is exact.
    static UNICOMM_INLINE T quotient(T x, int divisor) {
        if constexpr (sizeof(T) == 8) {
            return x / static_cast<T>(divisor);
        } else {
            using Wide = std::conditional_t<std::is_same_v<T, uint32_t>, int64_t, int32_t>;
            return static_cast<T>(static_cast<Wide>(double(x) / double(divisor)));
        }
    }
};

// Lanes alternate between real and imaginary parts.
template <class T>
struct ComplexProduct : Plain<T> {
    static UNICOMM_INLINE Vec<T> combine(Vec<T> acc, Vec<T> x) {
        return [&]<int... i>(std::integer_sequence<int, i...>) {
            Vec<T> real = __builtin_shufflevector(acc, acc, (i & ~1)...);
            Vec<T> imaginary = __builtin_shufflevector(acc, acc, (i | 1)...);
            Vec<T> swapped = __builtin_shufflevector(x, x, (i ^ 1)...);
            // Negating and adding gives the same bits as subtracting.
            constexpr Vec<T> kSigns = {(i & 1 ? T(1) : T(-1))...};
            return real * x + imaginary * swapped * kSigns;
        }(std::make_integer_sequence<int, kLanes<T>>());
    }
};

}  // namespace
}  // namespace unicomm::UNICOMM_ISA
