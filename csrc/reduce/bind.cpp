// Bindings of the reductions, for transports that only move bytes and for tests.
#include "base/bind.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "operations/tensor.hpp"
#include "reduce/fold.hpp"

namespace unicomm {
namespace {

// Below this size, releasing and taking the GIL costs more than other threads gain.
constexpr int64_t kHoldGil = 16 * 1024;

[[noreturn]] void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

Red red_of(int op) {
    if (op < int(Red::kSum) || op > int(Red::kReproducibleAvg)) {
        refuse("fold: " + std::to_string(op) + " is no reduce operation; pass the code of a ReduceOp");
    }
    return static_cast<Red>(op);
}

Tensor read(nb::handle object, const std::string& name) {
    Tensor t;
    if (!read_tensor(object.ptr(), t)) throw nb::python_error();
    if (t.device_type != 1) refuse("fold: " + name + " is not on the CPU; copy it there first");
    if (!t.contiguous) refuse("fold: " + name + " is not contiguous; pass tensor.contiguous()");
    return t;
}

bool overlaps_partly(const Tensor& a, const Tensor& b) {
    auto from_a = reinterpret_cast<uintptr_t>(a.data), from_b = reinterpret_cast<uintptr_t>(b.data);
    return from_a != from_b && from_a < from_b + uintptr_t(b.bytes) && from_b < from_a + uintptr_t(a.bytes);
}

bool fold_tensors(nb::object out, nb::list inputs, int op, std::optional<std::vector<double>> factors,
                  int n_avg) {
    Red red = red_of(op);
    Tensor to = read(out, "out");
    nb::tuple kept(inputs);  // the list may change while the GIL is released
    std::vector<const void*> sources;
    sources.reserve(kept.size());
    for (nb::handle input : kept) {
        std::string name = "input " + std::to_string(sources.size());
        Tensor from = read(input, name);
        if (from.dtype != to.dtype) refuse("fold: " + name + " and out differ in dtype; convert one of them");
        if (from.numel != to.numel) {
            refuse("fold: " + name + " has " + std::to_string(from.numel) + " elements and out " +
                   std::to_string(to.numel) + "; pass tensors of one size");
        }
        if (overlaps_partly(from, to)) {
            refuse("fold: " + name + " overlaps out partly; pass the same memory or separate memory");
        }
        sources.push_back(from.data);
    }
    if (sources.empty()) refuse("fold: no inputs; pass at least one");
    if (red == Red::kPremulSum && (!factors || factors->size() != sources.size())) {
        refuse("fold: PREMUL_SUM of " + std::to_string(sources.size()) + " inputs got " +
               std::to_string(factors ? factors->size() : 0) + " factors; pass one for each input");
    }
    if ((red == Red::kAvg || red == Red::kReproducibleAvg) && n_avg < 1) {
        refuse("fold: AVG got n_avg=" + std::to_string(n_avg) + "; pass the number of ranks");
    }

    std::optional<GilReleased> released;
    if (to.bytes > kHoldGil) released.emplace();
    return fold(to.dtype, red, to.data, sources.data(), int(sources.size()), to.numel,
                factors ? factors->data() : nullptr, n_avg);
}

}  // namespace

void bind_reduce(nb::module_& m) {
    m.def(
        "fold", &fold_tensors, nb::arg("out"), nb::arg("inputs"), nb::arg("op"),
        nb::arg("factors") = nb::none(), nb::arg("n_avg") = 0,
        nb::sig(
            "def fold(out: Tensor, inputs: list[Tensor], op: int, factors: Sequence[float] | None = None, "
            "n_avg: int = 0) -> bool"),
        "Folds the inputs from left to right into `out`, which may be one of them.\n\n"
        "All are contiguous CPU tensors of one dtype and size. `op` is a RedOpType; PREMUL_SUM takes a\n"
        "factor for each input, AVG the divisor `n_avg`. Returns False, with `out` untouched, if the dtype\n"
        "does not have the operation. Raises ValueError if the arguments do not fit together.");
    m.def(
        "fold_defined",
        [](uint8_t dtype, int op) { return fold_defined(static_cast<DType>(dtype), red_of(op)); },
        nb::arg("dtype"), nb::arg("op"), "Whether `fold` has the operation for this dtype number.");
    m.def("fold_isa", &fold_isa, "The instruction set that folds use: avx512, avx2 or baseline.");
    m.def(
        "set_fold_isa", [](const std::string& name) { return set_fold_isa(name.c_str()); }, nb::arg("name"),
        "Makes folds use another instruction set, for tests. Returns False if this machine lacks it.");
}

}  // namespace unicomm
