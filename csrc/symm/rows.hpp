// Tensors as the composites take them, and their refusals as Python gets them.
#pragma once
#include "core/bind.hpp"
#include "core/tensor.hpp"
#include "symm/composites.hpp"

namespace unicomm {

inline symm::Rows rows_of(const Tensor& t) {
    int64_t rows = t.ndim ? t.shape[0] : 1;
    return {static_cast<char*>(t.data), rows, rows ? uint64_t(t.bytes / rows) : 0};
}

inline symm::Memory memory_of(const Tensor& t) { return {static_cast<char*>(t.data), uint64_t(t.bytes)}; }

inline int64_t* numbers_of(const Tensor& t) { return static_cast<int64_t*>(t.data); }

// None, or (why, rank, rows).
inline nb::object refusal_tuple(const symm::Refusal& refusal) {
    if (refusal.why == symm::Refusal::kNone) return nb::none();
    return nb::make_tuple(int(refusal.why), refusal.pe, refusal.rows);
}

}  // namespace unicomm
