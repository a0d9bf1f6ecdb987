// The calls of Python functions that the current thread is in, read without creating Python's frame objects.
#pragma once
#include <Python.h>

#include <cstdint>

namespace unicomm {

// A call that has not returned: its function's code, and how far it has come.
struct Activation {
    PyObject* code;  // borrowed: the call holds it
    const void* at;  // the same for the same instruction of the same code
    bool operator==(const Activation&) const = default;
};

// What is called from further out than this is not seen. A program in Lightning or with nested hooks is in
// about 50 calls; the bound is for deep recursions.
constexpr int kMostActivations = 80;

struct CallStack {
    int size;
    uint64_t hash;
    Activation calls[kMostActivations];  // the innermost first
};

// Reads the calls of this thread. The GIL must be held.
void read_call_stack(CallStack& stack);

// Returns the line of a call, 0 if it has none.
int line_of(const Activation& call);

}  // namespace unicomm
