#pragma once
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace unicomm {
void bind_recorder(nb::module_& m);
void bind_dump(nb::module_& m);
void bind_reduce(nb::module_& m);
void bind_shm(nb::module_& m);
void bind_fast(nb::module_& m);
void bind_nccl(nb::module_& m);
void bind_symm(nb::module_& m);
void bind_torch_options(nb::module_& m);
}  // namespace unicomm
