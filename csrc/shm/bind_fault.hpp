#pragma once
#include "core/bind.hpp"
#include "core/error.hpp"

namespace unicomm {
// None, or (code, culprits, claims, detail); unicomm/backends/shm.py makes the error of it.
// Raises instead what a handler of signals has raised meanwhile.
nb::object fault_tuple(const Fault& f);
// After an operation without a fault: has such an exception come soon.
void raise_late_signals();
}  // namespace unicomm
