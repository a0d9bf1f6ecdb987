// Bindings of the wire formats.
#include <nanobind/stl/string.h>

#include <cstdint>
#include <optional>
#include <string>

#include "base/bind.hpp"
#include "operations/tensor.hpp"
#include "reduce/wire.hpp"

namespace unicomm {
namespace {

// Below this size, releasing and taking the GIL costs more than other threads gain.
constexpr int64_t kHoldGil = 16 * 1024;

[[noreturn]] void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

WireFormat format_of(int format) {
    if (format < int(WireFormat::kBFloat16) || format > int(WireFormat::kMxfp8)) {
        refuse("wire: " + std::to_string(format) + " is no format; pass the code of a WireFormat");
    }
    return static_cast<WireFormat>(format);
}

Tensor read(nb::handle object, const std::string& name) {
    Tensor t;
    if (!read_tensor(object.ptr(), t)) throw nb::python_error();
    if (t.device_type != 1) refuse("wire: " + name + " is not on the CPU; copy it there first");
    if (!t.contiguous) refuse("wire: " + name + " is not contiguous; pass tensor.contiguous()");
    return t;
}

// Reads the elements and the encoded bytes of a call, which must fit together.
void read_both(nb::handle elements, nb::handle encoded, WireFormat format, Tensor& plain, Tensor& bytes) {
    plain = read(elements, "the tensor of elements");
    bytes = read(encoded, "the tensor of bytes");
    if (!wire_defined(plain.dtype)) {
        refuse("wire: elements are float32, float16 or bfloat16; convert the tensor first");
    }
    if (bytes.bytes != wire_bytes(format, plain.numel)) {
        refuse("wire: " + std::to_string(plain.numel) + " elements need " +
               std::to_string(wire_bytes(format, plain.numel)) + " bytes, not " +
               std::to_string(bytes.bytes));
    }
    auto from_a = reinterpret_cast<uintptr_t>(plain.data), from_b = reinterpret_cast<uintptr_t>(bytes.data);
    if (from_a < from_b + uintptr_t(bytes.bytes) && from_b < from_a + uintptr_t(plain.bytes)) {
        refuse("wire: both tensors have memory in common; pass separate memory");
    }
}

void encode(nb::object out, nb::object input, int code, double factor, bool stochastic, uint64_t key,
            nb::object residual, int64_t first) {
    WireFormat format = format_of(code);
    Tensor plain, bytes, rest;
    read_both(input, out, format, plain, bytes);
    if (!residual.is_none()) {
        rest = read(residual, "the residual");
        if (rest.dtype != DType::kFloat32 || rest.numel != plain.numel) {
            refuse("wire: the residual is no float32 tensor of " + std::to_string(plain.numel) + " elements");
        }
    }
    std::optional<GilReleased> released;
    if (plain.bytes > kHoldGil) released.emplace();
    wire_encode(plain.dtype, format,
                {static_cast<const char*>(plain.data), static_cast<char*>(bytes.data), plain.numel,
                 static_cast<float>(factor), stochastic, key, first, static_cast<float*>(rest.data)});
}

void decode(nb::object out, nb::object input, int code, bool add) {
    WireFormat format = format_of(code);
    Tensor plain, bytes;
    read_both(out, input, format, plain, bytes);
    if (add && plain.dtype != DType::kFloat32)
        refuse("wire: only float32 can be added to; pass such a tensor");
    std::optional<GilReleased> released;
    if (plain.bytes > kHoldGil) released.emplace();
    wire_decode(plain.dtype, format,
                {static_cast<const char*>(bytes.data), static_cast<char*>(plain.data), plain.numel, add});
}

}  // namespace

void bind_wire(nb::module_& m) {
    m.def(
        "wire_bytes", [](int format, int64_t count) { return wire_bytes(format_of(format), count); },
        nb::arg("format"), nb::arg("count"), "The bytes of `count` encoded elements.");
    m.def("wire_encode", &encode, nb::arg("out"), nb::arg("input"), nb::arg("format"),
          nb::arg("factor") = 1.0, nb::arg("stochastic") = false, nb::arg("key") = 0,
          nb::arg("residual") = nb::none(), nb::arg("first") = 0,
          nb::sig("def wire_encode(out: Tensor, input: Tensor, format: int, factor: float = 1.0, "
                  "stochastic: bool = False, key: int = 0, residual: Tensor | None = None, first: int = 0) "
                  "-> None"),
          "Encodes the elements of `input`, times `factor`, into the bytes of `out`.\n\n"
          "Both are contiguous CPU tensors; `input` is float32, float16 or bfloat16. Rounds to nearest even, "
          "or\n"
          "`stochastic` by random bits that depend on `key` and the element's number, which is `first` for "
          "the\n"
          "first one. `residual`, float32, is added to the elements first, and replaced by what encoding "
          "loses of\n"
          "them. Raises ValueError if the arguments do not fit together.");
    m.def("wire_decode", &decode, nb::arg("out"), nb::arg("input"), nb::arg("format"), nb::arg("add") = false,
          nb::sig("def wire_decode(out: Tensor, input: Tensor, format: int, add: bool = False) -> None"),
          "Decodes the bytes of `input` into the elements of `out`, or adds them to it, which is float32 "
          "then.\n\n"
          "Raises ValueError if the arguments do not fit together.");
}

}  // namespace unicomm
