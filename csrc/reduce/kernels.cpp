// The loops over memory. Compiled once per instruction set, with UNICOMM_ISA as its name.
#include "reduce/arguments.hpp"
#include "reduce/codec.hpp"
#include "reduce/op.hpp"
#include "reduce/simd.hpp"

namespace unicomm::UNICOMM_ISA {
namespace {

// The number of vectors per step. Independent accumulators hide the latency of the arithmetic; four fit into
// the registers of every instruction set.
template <class Codec>
constexpr int kUnroll = Codec::kParts < 4 ? 4 / Codec::kParts : 1;

// Reads all sources before it stores anything, so dst may be one of them.
template <class Codec, template <class> class Op, int kVectors, int kSources, bool kPart>
UNICOMM_INLINE void step(const FoldArguments& args, int64_t at, int bytes) {
    using T = typename Codec::Lane;
    constexpr int kParts = Codec::kParts;
    Vec<T> acc[kVectors * kParts];
    char buffer[kVecBytes];
    auto read = [&](int k, Vec<T>* into) {
        const char* from = args.srcs[k] + at;
        if constexpr (kPart) {
            load_part(buffer, from, bytes);
            from = buffer;
        }
        repeat<kVectors>([&](auto v) { Codec::load(from + v * kVecBytes, into + v * kParts); });
        repeat<kVectors * kParts>([&](auto p) { into[p] = Op<T>::source(into[p], args, k); });
    };
    read(0, acc);
    const int n = kSources ? kSources : args.n;
    for (int k = 1; k < n; ++k) {
        Vec<T> x[kVectors * kParts];
        read(k, x);
        repeat<kVectors * kParts>([&](auto p) { acc[p] = Op<T>::combine(acc[p], x[p]); });
    }
    repeat<kVectors * kParts>([&](auto p) { acc[p] = Op<T>::result(acc[p], args); });
    char* to = kPart ? buffer : args.dst + at;
    repeat<kVectors>([&](auto v) { Codec::store(to + v * kVecBytes, acc + v * kParts); });
    if constexpr (kPart) store_part(args.dst + at, buffer, bytes);
}

template <class Codec, template <class> class Op>
__attribute__((noinline, flatten)) void kernel(const FoldArguments& given) {
    // A local copy stays in registers while dst is written.
    const FoldArguments args = given;
    constexpr int kUnrolled = kUnroll<Codec> * kVecBytes;
    int64_t at = 0;
    if (args.n == 2) {
        for (; at + kUnrolled <= args.bytes; at += kUnrolled) {
            step<Codec, Op, kUnroll<Codec>, 2, false>(args, at, 0);
        }
    } else {
        for (; at + kUnrolled <= args.bytes; at += kUnrolled) {
            step<Codec, Op, kUnroll<Codec>, 0, false>(args, at, 0);
        }
    }
    for (; at + kVecBytes <= args.bytes; at += kVecBytes) step<Codec, Op, 1, 0, false>(args, at, 0);
    if (at < args.bytes) step<Codec, Op, 1, 0, true>(args, at, int(args.bytes - at));
}

template <class Codec>
void run_float(Red red, const FoldArguments& args) {
    switch (red) {
        case Red::kSum:
            return kernel<Codec, Sum>(args);
        case Red::kProduct:
            return kernel<Codec, Product>(args);
        case Red::kMin:
            return kernel<Codec, Min>(args);
        case Red::kMax:
            return kernel<Codec, Max>(args);
        case Red::kPremulSum:
            return kernel<Codec, PremulSum>(args);
        default:
            return kernel<Codec, Avg>(args);
    }
}

// Wrapping sums and products, and bit operations, are the same for signed and unsigned integers.
template <class T>
void run_integer(Red red, const FoldArguments& args) {
    using Wrapping = Native<std::make_unsigned_t<T>>;
    switch (red) {
        case Red::kSum:
            return kernel<Wrapping, Sum>(args);
        case Red::kProduct:
            return kernel<Wrapping, Product>(args);
        case Red::kMin:
            return kernel<Native<T>, Min>(args);
        case Red::kMax:
            return kernel<Native<T>, Max>(args);
        case Red::kBand:
            return kernel<Native<uint64_t>, And>(args);
        case Red::kBor:
            return kernel<Native<uint64_t>, Or>(args);
        case Red::kBxor:
            return kernel<Native<uint64_t>, Xor>(args);
        case Red::kPremulSum:
            return kernel<Wrapping, PremulSum>(args);
        default:
            return kernel<Native<T>, Avg>(args);
    }
}

void run_bool(Red red, const FoldArguments& args) {
    switch (red) {
        case Red::kSum:
        case Red::kMax:
        case Red::kBor:
            return kernel<Truth, Or>(args);
        case Red::kBxor:
            return kernel<Truth, Xor>(args);
        default:
            return kernel<Truth, And>(args);
    }
}

template <class T>
void run_complex(Red red, const FoldArguments& args) {
    if (red == Red::kProduct) return kernel<Native<T>, ComplexProduct>(args);
    run_float<Native<T>>(red, args);
}

}  // namespace

void run(DType dtype, Red red, const FoldArguments& args) {
    switch (dtype) {
        case DType::kFloat64:
            return run_float<Native<double>>(red, args);
        case DType::kFloat32:
            return run_float<Native<float>>(red, args);
        case DType::kFloat16:
            return run_float<Float16>(red, args);
        case DType::kBFloat16:
            return run_float<BFloat16>(red, args);
        case DType::kFloat8E4M3:
            return run_float<Float8E4M3>(red, args);
        case DType::kFloat8E5M2:
            return run_float<Float8E5M2>(red, args);
        case DType::kInt8:
            return run_integer<int8_t>(red, args);
        case DType::kInt16:
            return run_integer<int16_t>(red, args);
        case DType::kInt32:
            return run_integer<int32_t>(red, args);
        case DType::kInt64:
            return run_integer<int64_t>(red, args);
        case DType::kUInt8:
            return run_integer<uint8_t>(red, args);
        case DType::kUInt16:
            return run_integer<uint16_t>(red, args);
        case DType::kUInt32:
            return run_integer<uint32_t>(red, args);
        case DType::kUInt64:
            return run_integer<uint64_t>(red, args);
        case DType::kBool:
            return run_bool(red, args);
        case DType::kComplex64:
            return run_complex<float>(red, args);
        case DType::kComplex128:
            return run_complex<double>(red, args);
        default:  // moved, never reduced
            return;
    }
}

}  // namespace unicomm::UNICOMM_ISA
