// Reproducible sums: the exact sum of all sources, rounded once. So the bits depend on the multiset of the
// sources alone, not on their order or on who adds which of them first.
//
// Three ways of adding, each of which notices when it would round; docs/design/reproducible.md has the proof:
//
//   1. in one float64, if the exponents of the sources of an element are so near each other that no addition
//      can round (kernels, for types narrower than float64);
//   2. in two float64, a sum and the sum of its rounding errors (TwoSum of Knuth, The Art of Computer
//      Programming 2, 4.2.2), if the second sum has no rounding error itself (kernels);
//   3. in a fixed-point number as wide as all float64 together (Kulisch and Miranker, The Arithmetic of the
//      Digital Computer, SIAM Review 28, 1986), always exact (ExactSum).
#pragma once
#include <array>
#include <cstdint>

#include "operations/reduction.hpp"
#include "reduce/arguments.hpp"

namespace unicomm {

// A fixed-point number with room for 2^31 float64. Infinities and NaN are counted beside it.
class ExactSum {
  public:
    void add(double x);
    // Returns the sum, rounded to nearest even; infinite if it is too large. NaN if there was a NaN or
    // infinities of both signs. Zero has the sign of the addends if all of them were zeros of one sign, else
    // +.
    double nearest() const { return rounded(false); }
    // Returns the sum, rounded to odd: cut to 53 bits, the last of which is set if anything but zeros was cut
    // off. Rounding that to nearest in a type of at most 51 bits gives the sum rounded once (Boldo and
    // Melquiond, Emulation of FMA and Correctly Rounded Sums, IEEE Transactions on Computers 57, 2008).
    double odd() const { return rounded(true); }

  private:
    double rounded(bool to_odd) const;

    static constexpr int kLowest = 1074;  // the last bit of the first digit is 2^-1074
    static constexpr int kDigits = (kLowest + 1024) / 32 + 4;
    std::array<int64_t, kDigits> digits_{};  // of 32 bits each, with carries that are not carried yet
    bool infinite_ = false, minus_infinite_ = false, nan_ = false, only_minus_zeros_ = true;
};

inline bool is_reproducible(Red red) { return red == Red::kReproducibleSum || red == Red::kReproducibleAvg; }

// Sets the floating-point environment of this thread to nearest even, with subnormal numbers, while it lives.
// Threads may have been told to flush subnormal numbers to zero.
class PlainArithmetic {
  public:
    PlainArithmetic();
    ~PlainArithmetic();
    PlainArithmetic(const PlainArithmetic&) = delete;
    PlainArithmetic& operator=(const PlainArithmetic&) = delete;

  private:
    uint64_t before_ = 0;
};

namespace baseline {
void run_exact(DType dtype, Red red, const FoldArguments& args);
}
#ifdef UNICOMM_X86
namespace avx2 {
void run_exact(DType dtype, Red red, const FoldArguments& args);
}
namespace avx512 {
void run_exact(DType dtype, Red red, const FoldArguments& args);
}
#endif

}  // namespace unicomm
