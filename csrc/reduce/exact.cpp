// The fixed-point sum, which is exact for any numbers, and the arithmetic that the kernels rely on.
#include "reduce/exact.hpp"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

namespace unicomm {

void ExactSum::add(double x) {
    auto bits = std::bit_cast<uint64_t>(x);
    bool negative = bits >> 63;
    auto exponent = static_cast<int>(bits >> 52 & 0x7ff);
    uint64_t mantissa = bits & ((uint64_t(1) << 52) - 1);
    if (bits != uint64_t(1) << 63) only_minus_zeros_ = false;
    if (exponent == 0x7ff) {
        (mantissa ? nan_ : negative ? minus_infinite_ : infinite_) = true;
        return;
    }
    if (exponent) {
        mantissa |= uint64_t(1) << 52;
        --exponent;  // subnormal numbers have the exponent of the smallest normal ones
    }
    auto wide = static_cast<unsigned __int128>(mantissa) << (exponent % 32);
    for (int64_t* digit = &digits_[size_t(exponent) / 32]; wide; wide >>= 32, ++digit) {
        auto part = static_cast<int64_t>(static_cast<uint32_t>(wide));
        *digit += negative ? -part : part;
    }
}

double ExactSum::rounded(bool to_odd) const {
    if (nan_ || (infinite_ && minus_infinite_)) return std::numeric_limits<double>::quiet_NaN();
    if (infinite_) return std::numeric_limits<double>::infinity();
    if (minus_infinite_) return -std::numeric_limits<double>::infinity();

    std::array<int64_t, kDigits> digits = digits_;
    auto carry_all = [&] {
        int64_t carry = 0;
        for (int64_t& digit : digits) {
            digit += carry;
            carry = digit >> 32;
            digit &= 0xffffffff;
        }
        return carry;
    };
    bool negative = carry_all() < 0;
    if (negative) {
        // The digits are those of the number plus a power of two.
        for (int64_t& digit : digits) digit = -digit;
        carry_all();
    }
    int top = kDigits - 1;
    while (top >= 0 && digits[size_t(top)] == 0) --top;
    if (top < 0) return only_minus_zeros_ ? -0.0 : 0.0;

    // The leading 64 bits, and whether anything but zeros follows.
    unsigned __int128 leading = 0;
    for (int i = top; i > top - 3; --i) leading = leading << 32 | uint64_t(i < 0 ? 0 : digits[size_t(i)]);
    int unused = std::countl_zero(static_cast<uint32_t>(digits[size_t(top)]));
    auto mantissa = static_cast<uint64_t>(leading >> (32 - unused));
    bool rest = static_cast<uint32_t>(leading) & ((uint64_t(1) << (32 - unused)) - 1);
    for (int i = top - 3; i >= 0 && !rest; --i) rest = digits[size_t(i)] != 0;
    int last = 32 * top - unused - 32 - kLowest;  // exponent of the last bit of `mantissa`

    constexpr int kCut = 11;
    constexpr uint64_t kHalf = uint64_t(1) << (kCut - 1);
    uint64_t cut = mantissa & (2 * kHalf - 1);
    uint64_t kept = mantissa >> kCut;
    if (to_odd) {
        kept |= uint64_t(cut || rest);
    } else {
        kept += cut > kHalf || (cut == kHalf && (rest || (kept & 1)));
    }
    // Sums below the smallest normal number end at 2^-1074, so nothing was cut off and this is exact.
    double magnitude = std::ldexp(static_cast<double>(kept), last + kCut);
    return negative ? -magnitude : magnitude;
}

#if defined(__SSE2__)
PlainArithmetic::PlainArithmetic() : before_(_mm_getcsr()) {
    constexpr unsigned kFlags = 0x3f, kDefault = 0x1f80;  // exceptions that have happened; all masked
    if ((before_ & ~kFlags) != kDefault) _mm_setcsr(kDefault);
}
PlainArithmetic::~PlainArithmetic() {
    if (_mm_getcsr() != before_) _mm_setcsr(static_cast<unsigned>(before_));
}
#elif defined(__aarch64__)
PlainArithmetic::PlainArithmetic() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    if (before_) asm volatile("msr fpcr, %0" ::"r"(uint64_t(0)) : "memory");
}
PlainArithmetic::~PlainArithmetic() {
    if (before_) asm volatile("msr fpcr, %0" ::"r"(before_) : "memory");
}
#else
PlainArithmetic::PlainArithmetic() = default;
PlainArithmetic::~PlainArithmetic() = default;
#endif

}  // namespace unicomm
