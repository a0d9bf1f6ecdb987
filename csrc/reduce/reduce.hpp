// Element-wise reductions of the native core: the heart of every all-reduce in host memory.
//
// One definition on all machines: sources are folded from left to right; float16, bfloat16 and float8 in
// float32, with one rounding at the end.
#pragma once
#include <cstdint>

#include "core/dtype.hpp"

namespace unicomm {

// The numbers of unicomm/comms/operations/reduction.py's RedOpType; a test compares the two.
enum class Red : uint8_t {
    kNone = 0,
    kSum = 1,
    kProduct = 2,
    kMin = 3,
    kMax = 4,
    kBand = 5,
    kBor = 6,
    kBxor = 7,
    kPremulSum = 8,
    kAvg = 9,
};

// dst[i] = srcs[0][i] op srcs[1][i] op ... op srcs[n - 1][i], for i < count.
//
// Pointers may have any alignment. dst may be the same address as any of the sources, but must not overlap
// one otherwise. `factors` holds one factor a source for kPremulSum and is ignored elsewhere; `n_avg` is the
// divisor of kAvg. False, with dst untouched, where fold_defined() is false, n < 1, factors are missing or
// n_avg < 1.
//
// - float32 and float64 accumulate in themselves, narrower floats in float32; the result is rounded to
//   nearest even as torch 2.13 does it: what is too large becomes infinity, or 448 in float8_e4m3fn.
// - Integers wrap around; kAvg divides toward zero; factors are truncated to integers and wrap.
// - kMin and kMax pass NaN on. Of -0.0 and 0.0, which compare equal, the one of the lower source stays.
// - The bits of a result are the same whatever the count, the alignment, the instruction set and the place of
//   dst; only a NaN's sign and payload are unspecified.
// - bool: kSum, kMax and kBor are "or", kProduct, kMin and kBand "and"; the result is 0 or 1.
// - complex: kProduct is (ac - bd, ad + bc); factors and divisors are real and apply to both parts.
bool fold(DType dtype, Red red, void* dst, const void* const* srcs, int n, int64_t count,
          const double* factors, int n_avg);

bool fold_defined(DType dtype, Red red);

// The instruction set that fold() uses: "avx512", "avx2" or "baseline".
const char* fold_isa();

// Makes fold() use another instruction set, for tests. False, without effect, where this machine lacks it.
bool set_fold_isa(const char* name);

}  // namespace unicomm
