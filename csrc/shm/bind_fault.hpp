#pragma once
#include "core/bind.hpp"
#include "core/error.hpp"

namespace unicomm {
// None, or (code, culprits, claims, detail); unicomm/backends/shm.py makes the error of it.
nb::object fault_tuple(const Fault& f);
}  // namespace unicomm
