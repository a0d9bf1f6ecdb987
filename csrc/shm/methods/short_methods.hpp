// Methods of the communicator as native methods, which try the fast path with no Python code in between.
#pragma once
#include "base/bind.hpp"
#include "operations/opcode.hpp"

namespace unicomm {

// Runs the operation `op` by the fast path of a communicator. `args` are those of the communicator's method
// after the instance, with its defaults filled in. Returns what that method of the fast path returns: False,
// before anything was done, if it does not take the operation, or if `fast_path` is of another backend.
nb::object call_fast(nb::handle fast_path, OpCode op, PyObject* const* args);

}  // namespace unicomm
