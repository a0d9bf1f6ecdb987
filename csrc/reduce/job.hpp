// What the dispatcher hands to a kernel: arguments that it has checked.
#pragma once
#include <cstdint>

#include "reduce/reduce.hpp"

namespace unicomm {

// A factor of kPremulSum in each of the types that a kernel may need.
struct Factor {
    double f64;
    float f32;
    uint64_t integer;  // modulo 2^64
};

struct Job {
    char* dst;
    const char* const* srcs;
    int n;          // sources
    int64_t bytes;  // of one source
    const Factor* factors;
    int divisor;
};

// Runs a job for which fold_defined() holds.
using Kernels = void (*)(DType, Red, const Job&);

namespace baseline {
void run(DType dtype, Red red, const Job& job);
}
#ifdef UNICOMM_X86
namespace avx2 {
void run(DType dtype, Red red, const Job& job);
}
namespace avx512 {
void run(DType dtype, Red red, const Job& job);
}
#endif

}  // namespace unicomm
