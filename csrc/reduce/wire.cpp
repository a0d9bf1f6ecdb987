// Checks the arguments of the wire formats and runs them with the best instruction set.
#include "reduce/wire.hpp"

#include "base/simulation.hpp"
#include "reduce/exact.hpp"
#include "reduce/isa.hpp"

namespace unicomm {

bool wire_defined(DType dtype) {
    return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

int64_t wire_bytes(WireFormat format, int64_t count) {
    if (format == WireFormat::kBFloat16) return 2 * count;
    int block = format == WireFormat::kFloat8E4M3 ? kLongBlock : kShortBlock;
    return count + (count + block - 1) / block;
}

bool wire_encode(DType dtype, WireFormat format, const EncodeArguments& args) {
    if (!wire_defined(dtype)) return false;
    if (args.count <= 0) return true;
    simulation::point("encode");
    PlainArithmetic here;
    isa().encode(dtype, format, args);
    return true;
}

bool wire_decode(DType dtype, WireFormat format, const DecodeArguments& args) {
    if (!wire_defined(dtype) || (args.adds && dtype != DType::kFloat32)) return false;
    if (args.count <= 0) return true;
    simulation::point("decode");
    PlainArithmetic here;
    isa().decode(dtype, format, args);
    return true;
}

bool convert_defined(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

void convert(DType dtype, Conversion how, const void* from, void* to, int64_t count) {
    if (count <= 0) return;
    simulation::point("convert");
    PlainArithmetic here;
    isa().convert(dtype, how, static_cast<const char*>(from), static_cast<char*>(to), count);
}

}  // namespace unicomm
