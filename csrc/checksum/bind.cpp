// Binding of the data checksum.
#include "base/bind.hpp"

#include <string>
#include <utility>
#include <vector>

#include "checksum/data_checksum.hpp"
#include "operations/tensor.hpp"

namespace unicomm {
namespace {

// Below this size, releasing and taking the GIL costs more than other threads gain.
constexpr int64_t kHoldGil = 16 * 1024;

uint64_t checksum(nb::sequence tensors) {
    nb::tuple kept(tensors);  // the list may change while the GIL is released
    std::vector<std::pair<const void*, int64_t>> pieces;
    pieces.reserve(kept.size());
    int64_t bytes = 0;
    for (nb::handle object : kept) {
        Tensor t;
        if (!read_tensor(object.ptr(), t)) throw nb::python_error();
        std::string name = "checksum: tensor " + std::to_string(pieces.size());
        if (t.device_type != 1) throw nb::value_error((name + " is not on the CPU").c_str());
        if (!t.contiguous) throw nb::value_error((name + " is not contiguous").c_str());
        pieces.emplace_back(t.data, t.bytes);
        bytes += t.bytes;
    }
    DataChecksum sum(pieces.size());
    if (bytes <= kHoldGil) {
        for (auto [data, size] : pieces) sum.add(data, size);
    } else {
        GilReleased released;
        for (auto [data, size] : pieces) sum.add(data, size);
    }
    return sum.value();
}

}  // namespace

void bind_checksum(nb::module_& m) {
    m.def("checksum", &checksum, nb::arg("tensors"),
          nb::sig("def checksum(tensors: Sequence[Tensor]) -> int"),
          "The 64-bit checksum of contiguous CPU tensors, in their order; ValueError for others.\n\n"
          "Differs for certain when one aligned word of 8 bytes differs. csrc/checksum/data_checksum.hpp\n"
          "defines it.");
}

}  // namespace unicomm
