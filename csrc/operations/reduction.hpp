// Codes of the reductions, as RedOpType in unicomm/comms/operations/reduction.py; a test compares the two.
#pragma once
#include <cstdint>

namespace unicomm {

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
    // The same bits for the same sources in any order: ReproducibleOp in reduction.py.
    kReproducibleSum = 10,
    kReproducibleAvg = 11,
};

}  // namespace unicomm
