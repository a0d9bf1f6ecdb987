// Faults for Python, and exceptions that a signal handler raised while an operation waited.
#pragma once
#include "base/bind.hpp"
#include "base/error.hpp"

namespace unicomm {

// Returns None, or (code, culprits, claims, detail, by), of which unicomm/comms/failures/faults.py makes the
// error. Raises instead what a signal handler has raised meanwhile.
nb::object fault_tuple(const Fault& f);

// For an operation that succeeded although a signal handler raised: raises that exception soon, in the main
// thread.
void raise_late_signals();

// Runs pending signal handlers if this is Python's main thread. Returns whether one of them has raised; the
// exception is kept for `fault_tuple`. Called without the GIL.
bool signal_has_raised();

// Keeps the current Python exception as if a signal handler had raised it.
void keep_raised();

}  // namespace unicomm
