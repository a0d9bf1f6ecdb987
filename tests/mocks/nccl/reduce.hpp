// Reductions of all data types.
#pragma once
#include <cstddef>

#include "abi.hpp"

namespace mock_nccl {

// A built-in operation, or (pre_multiply) a sum of values times a scalar of the data's type.
struct Reduction {
    RedOp op = kSum;
    bool pre_multiply = false;
    char scalar[8] = {};
};

size_t size_of(int dtype);

// out[i] = the reduction of inputs[0..n)[i]; out may be one of the inputs. Small floats are added in fp32 and
// rounded once; integers wrap, their average is truncated.
void reduce(void* out, const void* const* inputs, int n, size_t count, int dtype, const Reduction& reduction);

}  // namespace mock_nccl
