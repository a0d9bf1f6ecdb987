// Codes of the element types. They go into the recorder's ring and into signatures.
// unicomm/comms/operations/dtypes.py has the same list; a test compares the two.
#pragma once
#include <cstdint>

namespace unicomm {

enum class DType : uint8_t {
    kNone = 0,
    kFloat64 = 1,
    kFloat32 = 2,
    kFloat16 = 3,
    kBFloat16 = 4,
    kFloat8E4M3 = 5,
    kFloat8E5M2 = 6,
    kInt8 = 7,
    kInt16 = 8,
    kInt32 = 9,
    kInt64 = 10,
    kUInt8 = 11,
    kUInt16 = 12,
    kUInt32 = 13,
    kUInt64 = 14,
    kBool = 15,
    kComplex64 = 16,
    kComplex128 = 17,
    // Moved as bytes, never reduced.
    kOther = 18,
    kFloat8E8M0FNU = 19,
    kFloat4E2M1FNX2 = 20,
    kFloat8E4M3FNUZ = 21,
    kFloat8E5M2FNUZ = 22,
};

inline int dtype_bytes(DType t) {
    switch (t) {
        case DType::kFloat64:
        case DType::kInt64:
        case DType::kUInt64:
        case DType::kComplex64:
            return 8;
        case DType::kFloat32:
        case DType::kInt32:
        case DType::kUInt32:
            return 4;
        case DType::kFloat16:
        case DType::kBFloat16:
        case DType::kInt16:
        case DType::kUInt16:
            return 2;
        case DType::kComplex128:
            return 16;
        default:
            return 1;
    }
}

}  // namespace unicomm
