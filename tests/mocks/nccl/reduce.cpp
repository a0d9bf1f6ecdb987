#include "reduce.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace mock_nccl {
namespace {

uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// A float of `Exponent` and `Mantissa` bits. Those of 8 bits saturate, as CUDA's conversions do; e4m3 has no
// infinity.
template <class Bits, int Exponent, int Mantissa, bool Infinity, bool Saturate>
struct SmallFloat {
    Bits bits;
    static constexpr int kBias = (1 << (Exponent - 1)) - 1;
    static constexpr uint32_t kSign = 1u << (Exponent + Mantissa);
    static constexpr uint32_t kTop = ((1u << Exponent) - 1) << Mantissa;
    static constexpr uint32_t kLargest = Infinity ? kTop - 1 : kSign - 2;

    float load() const {
        uint32_t magnitude = bits & (kSign - 1);
        float value;
        if (Infinity ? magnitude > kTop : magnitude == kSign - 1)
            value = NAN;
        else if (Infinity && magnitude == kTop)
            value = INFINITY;
        else if (magnitude >> Mantissa == 0)
            value = std::ldexp(static_cast<float>(magnitude), 1 - kBias - Mantissa);
        else
            value = std::ldexp(static_cast<float>((magnitude & ((1u << Mantissa) - 1)) | (1u << Mantissa)),
                               static_cast<int>(magnitude >> Mantissa) - kBias - Mantissa);
        return bits & kSign ? -value : value;
    }

    void store(float value) {
        uint32_t all = bits_of(value), magnitude = all & 0x7fffffff, sign = all >> 31 ? kSign : 0;
        if (magnitude > 0x7f800000) {
            bits = static_cast<Bits>(sign | (kSign - 1));
            return;
        }
        int exponent = static_cast<int>(magnitude >> 23) - 127;
        uint32_t mantissa = (magnitude & 0x7fffff) | 0x800000, base = 0;
        int shift = 23 - Mantissa;
        if (exponent < 1 - kBias)
            shift += 1 - kBias - exponent;  // not normalised any more
        else
            base = static_cast<uint32_t>(exponent + kBias - 1) << Mantissa;
        uint32_t result = 0;
        if (shift <= 25) {
            uint32_t kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1),
                     half = 1u << (shift - 1);
            result = base + kept + (rest > half || (rest == half && (kept & 1)));
        }
        if (result > kLargest) result = Saturate ? kLargest : kTop;
        bits = static_cast<Bits>(sign | result);
    }
};
using Half = SmallFloat<uint16_t, 5, 10, true, false>;
using E4m3 = SmallFloat<uint8_t, 4, 3, false, true>;
using E5m2 = SmallFloat<uint8_t, 5, 2, true, true>;

struct Bfloat16 {
    uint16_t bits;
    float load() const { return float_of(static_cast<uint32_t>(bits) << 16); }
    void store(float value) {
        uint32_t all = bits_of(value);
        bits = std::isnan(value) ? 0x7fc0 : static_cast<uint16_t>((all + 0x7fff + ((all >> 16) & 1)) >> 16);
    }
};

template <class T>
struct Native {
    T value;
    T load() const { return value; }
    void store(T v) { value = v; }
};

template <class T>
T add(T a, T b) {
    if constexpr (std::is_integral_v<T>)
        return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) +
                              static_cast<std::make_unsigned_t<T>>(b));
    else
        return a + b;
}

template <class T>
T times(T a, T b) {
    if constexpr (std::is_integral_v<T>)
        return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) *
                              static_cast<std::make_unsigned_t<T>>(b));
    else
        return a * b;
}

template <class T>
T larger(T a, T b) {
    if constexpr (std::is_integral_v<T>)
        return std::max(a, b);
    else
        return std::fmax(a, b);
}

template <class T>
T smaller(T a, T b) {
    if constexpr (std::is_integral_v<T>)
        return std::min(a, b);
    else
        return std::fmin(a, b);
}

template <class Element>
void reduce_as(void* out, const void* const* inputs, int n, size_t count, const Reduction& reduction) {
    using Value = decltype(Element{}.load());
    constexpr size_t kBlock = 512;
    Value sums[kBlock];
    Element scalar;
    memcpy(&scalar, reduction.scalar, sizeof scalar);
    for (size_t start = 0; start < count; start += kBlock) {
        size_t here = std::min(kBlock, count - start);
        for (int rank = 0; rank < n; ++rank) {
            const Element* in = static_cast<const Element*>(inputs[rank]) + start;
            for (size_t i = 0; i < here; ++i) {
                Value value = in[i].load();
                if (reduction.pre_multiply) value = times(value, scalar.load());
                if (rank == 0)
                    sums[i] = value;
                else if (reduction.op == kProd)
                    sums[i] = times(sums[i], value);
                else if (reduction.op == kMax)
                    sums[i] = larger(sums[i], value);
                else if (reduction.op == kMin)
                    sums[i] = smaller(sums[i], value);
                else
                    sums[i] = add(sums[i], value);
            }
        }
        Element* to = static_cast<Element*>(out) + start;
        for (size_t i = 0; i < here; ++i)
            to[i].store(reduction.op == kAvg ? static_cast<Value>(sums[i] / static_cast<Value>(n)) : sums[i]);
    }
}

}  // namespace

size_t size_of(int dtype) {
    static constexpr size_t sizes[kDataTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[dtype];
}

void reduce(void* out, const void* const* inputs, int n, size_t count, int dtype,
            const Reduction& reduction) {
    using Kernel = void (*)(void*, const void* const*, int, size_t, const Reduction&);
    static constexpr Kernel kernels[kDataTypes] = {
        reduce_as<Native<int8_t>>,
        reduce_as<Native<uint8_t>>,
        reduce_as<Native<int32_t>>,
        reduce_as<Native<uint32_t>>,
        reduce_as<Native<int64_t>>,
        reduce_as<Native<uint64_t>>,
        reduce_as<Half>,
        reduce_as<Native<float>>,
        reduce_as<Native<double>>,
        reduce_as<Bfloat16>,
        reduce_as<E4m3>,
        reduce_as<E5m2>,
    };
    kernels[dtype](out, inputs, n, count, reduction);
}

}  // namespace mock_nccl
