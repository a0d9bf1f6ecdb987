// The loops over memory. Compiled once per instruction set, with UNICOMM_ISA naming it.
#include "reduce/codec.hpp"
#include "reduce/job.hpp"
#include "reduce/lanes.hpp"
#include "reduce/op.hpp"

namespace unicomm::UNICOMM_ISA {
namespace {

// Vectors of memory that one step takes. Accumulators that do not depend on each other hide the latency
// of the arithmetic; four fit into the registers of every instruction set.
template <class Codec>
constexpr int kUnroll = Codec::kParts < 4 ? 4 / Codec::kParts : 1;

// All sources are read before anything is stored, so dst may be one of them.
// kSources: how many sources there are, 0 where only the job knows. kPart: `bytes` of one vector.
template <class Codec, template <class> class Op, int kVectors, int kSources, bool kPart>
UNICOMM_INLINE void step(const Job& job, int64_t at, int bytes) {
    using T = typename Codec::Lane;
    constexpr int kParts = Codec::kParts;
    Vec<T> acc[kVectors * kParts];
    char buffer[kVecBytes];
    auto read = [&](int k, Vec<T>* into) {
        const char* from = job.srcs[k] + at;
        if constexpr (kPart) {
            load_part(buffer, from, bytes);
            from = buffer;
        }
        repeat<kVectors>([&](auto v) { Codec::load(from + v * kVecBytes, into + v * kParts); });
        repeat<kVectors * kParts>([&](auto p) { into[p] = Op<T>::source(into[p], job, k); });
    };
    read(0, acc);
    const int n = kSources ? kSources : job.n;
    for (int k = 1; k < n; ++k) {
        Vec<T> x[kVectors * kParts];
        read(k, x);
        repeat<kVectors * kParts>([&](auto p) { acc[p] = Op<T>::combine(acc[p], x[p]); });
    }
    repeat<kVectors * kParts>([&](auto p) { acc[p] = Op<T>::result(acc[p], job); });
    char* to = kPart ? buffer : job.dst + at;
    repeat<kVectors>([&](auto v) { Codec::store(to + v * kVecBytes, acc + v * kParts); });
    if constexpr (kPart) store_part(job.dst + at, buffer, bytes);
}

template <class Codec, template <class> class Op>
__attribute__((noinline, flatten)) void kernel(const Job& given) {
    // A copy that nobody else can see stays in registers while dst is written.
    const Job job = given;
    constexpr int kUnrolled = kUnroll<Codec> * kVecBytes;
    int64_t at = 0;
    if (job.n == 2) {
        for (; at + kUnrolled <= job.bytes; at += kUnrolled) {
            step<Codec, Op, kUnroll<Codec>, 2, false>(job, at, 0);
        }
    } else {
        for (; at + kUnrolled <= job.bytes; at += kUnrolled) {
            step<Codec, Op, kUnroll<Codec>, 0, false>(job, at, 0);
        }
    }
    for (; at + kVecBytes <= job.bytes; at += kVecBytes) step<Codec, Op, 1, 0, false>(job, at, 0);
    if (at < job.bytes) step<Codec, Op, 1, 0, true>(job, at, int(job.bytes - at));
}

template <class Codec>
void run_float(Red red, const Job& job) {
    switch (red) {
        case Red::kSum:
            return kernel<Codec, Sum>(job);
        case Red::kProduct:
            return kernel<Codec, Product>(job);
        case Red::kMin:
            return kernel<Codec, Min>(job);
        case Red::kMax:
            return kernel<Codec, Max>(job);
        case Red::kPremulSum:
            return kernel<Codec, PremulSum>(job);
        default:
            return kernel<Codec, Avg>(job);
    }
}

// Sums and products that wrap, and bits, are the same for signed and unsigned integers.
template <class T>
void run_integer(Red red, const Job& job) {
    using Wrapping = Native<std::make_unsigned_t<T>>;
    switch (red) {
        case Red::kSum:
            return kernel<Wrapping, Sum>(job);
        case Red::kProduct:
            return kernel<Wrapping, Product>(job);
        case Red::kMin:
            return kernel<Native<T>, Min>(job);
        case Red::kMax:
            return kernel<Native<T>, Max>(job);
        case Red::kBand:
            return kernel<Native<uint64_t>, And>(job);
        case Red::kBor:
            return kernel<Native<uint64_t>, Or>(job);
        case Red::kBxor:
            return kernel<Native<uint64_t>, Xor>(job);
        case Red::kPremulSum:
            return kernel<Wrapping, PremulSum>(job);
        default:
            return kernel<Native<T>, Avg>(job);
    }
}

void run_bool(Red red, const Job& job) {
    switch (red) {
        case Red::kSum:
        case Red::kMax:
        case Red::kBor:
            return kernel<Truth, Or>(job);
        case Red::kBxor:
            return kernel<Truth, Xor>(job);
        default:
            return kernel<Truth, And>(job);
    }
}

template <class T>
void run_complex(Red red, const Job& job) {
    if (red == Red::kProduct) return kernel<Native<T>, ComplexProduct>(job);
    run_float<Native<T>>(red, job);
}

}  // namespace

void run(DType dtype, Red red, const Job& job) {
    switch (dtype) {
        case DType::kFloat64:
            return run_float<Native<double>>(red, job);
        case DType::kFloat32:
            return run_float<Native<float>>(red, job);
        case DType::kFloat16:
            return run_float<Float16>(red, job);
        case DType::kBFloat16:
            return run_float<BFloat16>(red, job);
        case DType::kFloat8E4M3:
            return run_float<Float8E4M3>(red, job);
        case DType::kFloat8E5M2:
            return run_float<Float8E5M2>(red, job);
        case DType::kInt8:
            return run_integer<int8_t>(red, job);
        case DType::kInt16:
            return run_integer<int16_t>(red, job);
        case DType::kInt32:
            return run_integer<int32_t>(red, job);
        case DType::kInt64:
            return run_integer<int64_t>(red, job);
        case DType::kUInt8:
            return run_integer<uint8_t>(red, job);
        case DType::kUInt16:
            return run_integer<uint16_t>(red, job);
        case DType::kUInt32:
            return run_integer<uint32_t>(red, job);
        case DType::kUInt64:
            return run_integer<uint64_t>(red, job);
        case DType::kBool:
            return run_bool(red, job);
        case DType::kComplex64:
            return run_complex<float>(red, job);
        case DType::kComplex128:
            return run_complex<double>(red, job);
        case DType::kNone:
        case DType::kOther:
            return;
    }
}

}  // namespace unicomm::UNICOMM_ISA
