// What the sources need of Python beyond its limited interface, so that one build serves every Python from
// 3.12 on: docs/design/wheels.md. The functions do the same with and without Py_LIMITED_API.
#pragma once
#include <Python.h>

namespace unicomm {

// The macros of these names read the object itself, which the limited interface does not show.
#ifdef Py_LIMITED_API
inline Py_ssize_t list_size(PyObject* list) { return PyList_Size(list); }
inline PyObject* list_item(PyObject* list, Py_ssize_t i) { return PyList_GetItem(list, i); }
inline Py_ssize_t tuple_size(PyObject* tuple) { return PyTuple_Size(tuple); }
inline PyObject* tuple_item(PyObject* tuple, Py_ssize_t i) { return PyTuple_GetItem(tuple, i); }
#else
inline Py_ssize_t list_size(PyObject* list) { return PyList_GET_SIZE(list); }
inline PyObject* list_item(PyObject* list, Py_ssize_t i) { return PyList_GET_ITEM(list, i); }
inline Py_ssize_t tuple_size(PyObject* tuple) { return PyTuple_GET_SIZE(tuple); }
inline PyObject* tuple_item(PyObject* tuple, Py_ssize_t i) { return PyTuple_GET_ITEM(tuple, i); }
#endif

// Each returns a new reference, or nullptr with an exception.
inline PyObject* call_one(PyObject* function, PyObject* argument) {
    return PyObject_Vectorcall(function, &argument, 1, nullptr);
}
inline PyObject* call_method(PyObject* owner, PyObject* name) {
    return PyObject_VectorcallMethod(name, &owner, 1, nullptr);
}
inline PyObject* call_method(PyObject* owner, PyObject* name, PyObject* argument) {
    PyObject* args[] = {owner, argument};
    return PyObject_VectorcallMethod(name, args, 2, nullptr);
}

}  // namespace unicomm
