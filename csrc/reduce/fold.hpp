// Element-wise reductions of the native core.
//
// The definition is the same on all machines: sources are folded from left to right; float16, bfloat16 and
// float8 in float32, with one rounding at the end.
#pragma once
#include <cstdint>

#include "operations/dtype.hpp"
#include "operations/reduction.hpp"

namespace unicomm {

// Computes dst[i] = srcs[0][i] op srcs[1][i] op ... op srcs[n - 1][i], for i < count.
//
// Pointers may have any alignment. dst may be the address of any source, but must not overlap a source
// otherwise. `factors` holds one factor per source for kPremulSum and is ignored otherwise; `n_avg` is the
// divisor of kAvg. Returns false, with dst untouched, if fold_defined() is false, n < 1, factors are missing
// or n_avg < 1.
//
// - float32 and float64 accumulate in themselves, narrower floats in float32. The result is rounded to
//   nearest even like torch 2.13 does: too large values become infinity, or 448 in float8_e4m3fn.
// - Integers wrap around; kAvg divides toward zero; factors are truncated to integers and wrap.
// - kMin and kMax propagate NaN. Of -0.0 and 0.0, which compare equal, that of the lower source stays.
// - The bits of a result do not depend on the count, the alignment, the instruction set and the place of dst;
//   only the sign and payload of a NaN are unspecified.
// - bool: kSum, kMax and kBor are "or", kProduct, kMin and kBand are "and"; the result is 0 or 1.
// - complex: kProduct is (ac - bd, ad + bc); factors and divisors are real and apply to both parts.
bool fold(DType dtype, Red red, void* dst, const void* const* srcs, int n, int64_t count,
          const double* factors, int n_avg);

bool fold_defined(DType dtype, Red red);

// Returns the instruction set that fold() uses: "avx512", "avx2" or "baseline".
const char* fold_isa();

// Makes fold() use another instruction set, for tests. Returns false, without effect, if this machine lacks
// it.
bool set_fold_isa(const char* name);

}  // namespace unicomm
