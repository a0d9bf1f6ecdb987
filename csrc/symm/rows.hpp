// Tensors as arguments of the composites, and refusals as Python objects.
#pragma once
#include "base/bind.hpp"
#include "operations/tensor.hpp"
#include "symm/composites.hpp"

namespace unicomm {

inline symm::Rows rows_of(const Tensor& t) {
    int64_t rows = t.ndim ? t.shape[0] : 1;
    return {static_cast<char*>(t.data), rows, rows ? uint64_t(t.bytes / rows) : 0};
}

inline symm::Memory memory_of(const Tensor& t) { return {static_cast<char*>(t.data), uint64_t(t.bytes)}; }

inline int64_t* numbers_of(const Tensor& t) { return static_cast<int64_t*>(t.data); }

// Returns None, or (why, rank, rows).
inline nb::object refusal_tuple(const symm::Refusal& refusal) {
    if (refusal.why == symm::Refusal::kNone) return nb::none();
    return nb::make_tuple(int(refusal.why), refusal.pe, refusal.rows);
}

}  // namespace unicomm
