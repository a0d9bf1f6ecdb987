// A property of torch's options that notes what was set last.
//
// Reading an option through torch's getter costs up to 440 ns, since pybind11 makes a Python object for it;
// dist.all_reduce sets both options right before its call, so a note of that serves as well.
#pragma once
#include "base/bind.hpp"

namespace unicomm {

// What this thread set last, and on which options. The addresses are to be compared, never used: the objects
// may be gone.
struct OptionNote {
    const PyObject* owner = nullptr;
    const PyObject* reduction = nullptr;
    const PyObject* async_op = nullptr;
};

extern thread_local OptionNote option_note;

}  // namespace unicomm
