// The checked arguments that fold() passes to a kernel.
#pragma once
#include <cstdint>

#include "reduce/fold.hpp"

namespace unicomm {

// A factor of kPremulSum in each type that a kernel may need.
struct Factor {
    double f64;
    float f32;
    uint64_t integer;  // modulo 2^64
};

struct FoldArguments {
    char* dst;
    const char* const* srcs;
    int n;          // number of sources
    int64_t bytes;  // bytes of one source
    const Factor* factors;
    int divisor;
};

// Runs a fold for which fold_defined() holds.
using Kernels = void (*)(DType, Red, const FoldArguments&);

namespace baseline {
void run(DType dtype, Red red, const FoldArguments& args);
}
#ifdef UNICOMM_X86
namespace avx2 {
void run(DType dtype, Red red, const FoldArguments& args);
}
namespace avx512 {
void run(DType dtype, Red red, const FoldArguments& args);
}
#endif

}  // namespace unicomm
