// A method of a Python class in native code, before a method written in Python that takes every call which
// the native code does not take.
//
// The type is Python's own kind of a function: called without a bound method in between, and without the
// matching of arguments that a nanobind function does, which together cost as much as a small operation.
#pragma once
#include "base/bind.hpp"

namespace unicomm {

// What a native method does. `args` are those of the vectorcall protocol, the instance first.
class NativeMethod {
  public:
    virtual ~NativeMethod() = default;
    // Returns the result, or an invalid object, before anything was done, if the other method has to run.
    virtual nb::object take(PyObject* const* args, size_t nargs, PyObject* names) = 0;
    // Calls the method written in Python.
    virtual PyObject* pass_on(PyObject* const* args, size_t nargsf, PyObject* names) = 0;
    // What Python gets that looks the method up without calling it: the function that stands for it, or an
    // invalid handle for the method itself. torch.compile traces functions only.
    virtual nb::handle looked_up() const = 0;
    virtual const char* name() const = 0;
};

// Returns the Python object of a method, which owns `method`.
nb::object method_object(NativeMethod* method);

// Returns an attribute; `name` is a str. Raises what Python raises.
inline nb::object attribute_of(nb::handle owner, PyObject* name) {
    nb::object found = nb::steal(PyObject_GetAttr(owner.ptr(), name));
    if (!found.is_valid()) throw nb::python_error();
    return found;
}

}  // namespace unicomm
