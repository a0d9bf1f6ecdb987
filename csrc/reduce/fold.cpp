// Checks the arguments of a fold and runs it with the best instruction set of this machine.
#include "reduce/fold.hpp"

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/simulation.hpp"
#include "reduce/arguments.hpp"
#include "reduce/exact.hpp"
#include "reduce/isa.hpp"

namespace unicomm {
namespace {

// Best first.
constexpr Isa kIsas[] = {
#ifdef UNICOMM_X86
    {"avx512", avx512::run, avx512::run_exact, avx512::encode, avx512::decode, avx512::convert,
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
     }},
    {"avx2", avx2::run, avx2::run_exact, avx2::encode, avx2::decode, avx2::convert,
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }},
#endif
    {"baseline", baseline::run, baseline::run_exact, baseline::encode, baseline::decode, baseline::convert,
     [] { return true; }},
};

std::atomic<const Isa*> chosen{nullptr};

bool is_float(DType t) { return t >= DType::kFloat64 && t <= DType::kFloat8E5M2; }
bool is_integer(DType t) { return t >= DType::kInt8 && t <= DType::kUInt64; }
bool is_complex(DType t) { return t == DType::kComplex64 || t == DType::kComplex128; }

// Truncates toward zero, then wraps modulo 2^64 like integers; 0 for what is no number.
uint64_t wrapped(double factor) {
    if (!std::isfinite(factor)) return 0;
    auto magnitude = static_cast<uint64_t>(std::fmod(std::trunc(std::fabs(factor)), 0x1p64));
    return factor < 0 ? 0 - magnitude : magnitude;
}

}  // namespace

const Isa& isa() {
    const Isa* found = chosen.load(std::memory_order_relaxed);
    if (!found) {
        found = kIsas;
        while (!found->available()) ++found;
        chosen.store(found, std::memory_order_relaxed);
    }
    return *found;
}

bool fold_defined(DType dtype, Red red) {
    switch (red) {
        case Red::kSum:
        case Red::kProduct:
            return is_float(dtype) || is_integer(dtype) || is_complex(dtype) || dtype == DType::kBool;
        case Red::kMin:
        case Red::kMax:
            return is_float(dtype) || is_integer(dtype) || dtype == DType::kBool;
        case Red::kBand:
        case Red::kBor:
        case Red::kBxor:
            return is_integer(dtype) || dtype == DType::kBool;
        case Red::kPremulSum:
        case Red::kAvg:
            return is_float(dtype) || is_integer(dtype) || is_complex(dtype);
        case Red::kReproducibleSum:
        case Red::kReproducibleAvg:
            return dtype >= DType::kFloat64 && dtype <= DType::kBFloat16;
        default:
            return false;
    }
}

bool fold(DType dtype, Red red, void* dst, const void* const* srcs, int n, int64_t count,
          const double* factors, int n_avg) {
    if (n < 1 || !fold_defined(dtype, red)) return false;
    if (red == Red::kPremulSum && !factors) return false;
    if ((red == Red::kAvg || red == Red::kReproducibleAvg) && n_avg < 1) return false;
    if (count <= 0) return true;

    FoldArguments args{static_cast<char*>(dst),
                       reinterpret_cast<const char* const*>(srcs),
                       n,
                       count * dtype_bytes(dtype),
                       nullptr,
                       n_avg};
    if (is_reproducible(red)) {
        simulation::point("fold");
        PlainArithmetic here;
        isa().run_exact(dtype, red, args);
        return true;
    }
    bool computes = red == Red::kPremulSum || red == Red::kAvg || dtype == DType::kBool;
    if (n == 1 && !computes) {
        if (dst != srcs[0]) std::memcpy(dst, srcs[0], static_cast<size_t>(args.bytes));
        return true;
    }
    std::vector<Factor> converted;
    if (red == Red::kPremulSum) {
        converted.reserve(static_cast<size_t>(n));
        for (int k = 0; k < n; ++k) {
            // The codec of bfloat16 needs NaNs whose lower half is zero.
            double factor = std::isnan(factors[k]) ? std::numeric_limits<double>::quiet_NaN() : factors[k];
            converted.push_back({factor, static_cast<float>(factor), wrapped(factor)});
        }
        args.factors = converted.data();
    }
    simulation::point("fold");
    isa().run(dtype, red, args);
    return true;
}

const char* fold_isa() { return isa().name; }

bool set_fold_isa(const char* name) {
    for (const Isa& candidate : kIsas) {
        if (std::strcmp(candidate.name, name) != 0) continue;
        if (!candidate.available()) return false;
        chosen.store(&candidate, std::memory_order_relaxed);
        return true;
    }
    return false;
}

}  // namespace unicomm
