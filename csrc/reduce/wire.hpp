// Wire formats: floats in fewer bytes, for links that are slower than the processor.
//
// Elements are encoded from float32; narrower types are converted to it first, which is exact.
//
//   bfloat16        the upper half of a float32
//   block formats   one byte an element, in blocks that share a scale of a power of two, 2^(byte - 127)
//                   (E8M0 of the OCP Microscaling Formats specification 1.0)
//
//   mxfp8           E4M3, blocks of 32: MXFP8 of that specification
//   int8            whole numbers of 1/64 from -127 to 127, blocks of 32: MXINT8 of that specification
//   float8_e4m3fn   E4M3, blocks of 128
//
// In memory the bytes of all elements come first, then the bytes of all scales; the last block may be short.
// A block's scale is the least one with which none of its elements exceeds the greatest number (448 or
// 127/64), at least 2^-127 (E4M3) or 2^-121 (int8). A block with an infinity or a NaN has the scale 255,
// which is NaN, and so are all its elements once they are decoded.
//
// Rounding is to nearest, of two the even one; or stochastic: up or down, with the probability that makes the
// expected value the number itself. The bits depend on the numbers and the key alone, not on the machine.
#pragma once
#include <cstdint>

#include "operations/dtype.hpp"

namespace unicomm {

enum class WireFormat : uint8_t {
    kNone = 0,
    kBFloat16 = 1,
    kFloat8E4M3 = 2,
    kInt8 = 3,
    kMxfp8 = 4,
};

constexpr int kShortBlock = 32;
constexpr int kLongBlock = 128;

struct EncodeArguments {
    const char* src;
    char* dst;
    int64_t count;
    float factor;  // of each element, before it is encoded
    bool stochastic;
    uint64_t key;   // of the random bits
    int64_t first;  // number of the first element in the tensor that it is a chunk of, for its random bits
    // Null, or a number for each element: it is added to the element first, and replaced by what encoding
    // loses of the sum; 0 where that is not finite.
    float* residual;
};

struct DecodeArguments {
    const char* src;
    char* dst;
    int64_t count;
    bool adds;  // to dst, which is float32
};

using Encoder = void (*)(DType, WireFormat, const EncodeArguments&);
using Decoder = void (*)(DType, WireFormat, const DecodeArguments&);

// Returns whether elements of this type can be encoded: float32, float16 and bfloat16.
bool wire_defined(DType dtype);

// Returns the bytes of `count` encoded elements.
int64_t wire_bytes(WireFormat format, int64_t count);

// Both return false, with dst untouched, if wire_defined() is false; decode also if it adds to narrow
// elements.
bool wire_encode(DType dtype, WireFormat format, const EncodeArguments& args);
bool wire_decode(DType dtype, WireFormat format, const DecodeArguments& args);

// Conversions of float16 and bfloat16, for sums in float32 that are rounded once.
enum class Conversion {
    kWiden,  // to float32, exactly
    kAdd,    // the same, added to what is there
    kRound,  // from float32, to nearest, of two the even one
};

using Converter = void (*)(DType, Conversion, const char* from, char* to, int64_t count);

// Whether `convert` takes this type.
bool convert_defined(DType dtype);
void convert(DType dtype, Conversion how, const void* from, void* to, int64_t count);

namespace baseline {
void encode(DType dtype, WireFormat format, const EncodeArguments& args);
void decode(DType dtype, WireFormat format, const DecodeArguments& args);
void convert(DType dtype, Conversion how, const char* from, char* to, int64_t count);
}  // namespace baseline
#ifdef UNICOMM_X86
namespace avx2 {
void encode(DType dtype, WireFormat format, const EncodeArguments& args);
void decode(DType dtype, WireFormat format, const DecodeArguments& args);
void convert(DType dtype, Conversion how, const char* from, char* to, int64_t count);
}  // namespace avx2
namespace avx512 {
void encode(DType dtype, WireFormat format, const EncodeArguments& args);
void decode(DType dtype, WireFormat format, const DecodeArguments& args);
void convert(DType dtype, Conversion how, const char* from, char* to, int64_t count);
}  // namespace avx512
#endif

}  // namespace unicomm
