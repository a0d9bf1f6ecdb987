// `allreduce` of a process group as a method in native code: the fast path if it takes the call, else a
// method written in Python.
//
// The type is Python's own kind of a function: called without a bound method in between, and without the
// matching of arguments that a nanobind function does, which together cost as much as the call itself.
// clang-format off: structmember.h needs Python.h before it
#include "shm/group_all_reduce.hpp"

#include <structmember.h>
// clang-format on

namespace unicomm {
namespace {

struct Method {
    PyObject_HEAD vectorcallfunc call;
    AllReduceOptions* options;
    PyObject* path;              // tuple: names of the attributes from the group to the fast path
    PyObject *general, *failed;  // names of methods of the group
    PyObject* done;              // the Work of an operation that has completed
};

nb::object attribute(nb::handle owner, PyObject* name) {
    nb::object found = nb::steal(PyObject_GetAttr(owner.ptr(), name));
    if (!found.is_valid()) throw nb::python_error();
    return found;
}

// Returns an invalid object if the fast path does not take the call.
nb::object fast(const Method* m, nb::handle group, nb::handle tensors, nb::handle options) {
    nb::object found = nb::borrow(group);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(m->path); ++i) {
        found = attribute(found, PyTuple_GET_ITEM(m->path, i));
        if (found.is_none()) return {};
    }
    nb::object result = all_reduce_of_group(found, tensors, options, *m->options);
    if (result.ptr() == Py_False) return {};
    if (result.is_none()) return result;
    if (result.ptr() == Py_True) return nb::borrow(m->done);
    result = nb::steal(PyObject_CallMethodOneArg(group.ptr(), m->failed, result.ptr()));
    if (!result.is_valid()) throw nb::python_error();
    return result;
}

PyObject* call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
    auto* m = reinterpret_cast<Method*>(self);
    try {
        if (PyVectorcall_NARGS(nargsf) == 3 && !names) {
            if (nb::object result = fast(m, args[0], args[1], args[2]); result.is_valid())
                return result.release().ptr();
        }
    } catch (nb::python_error& error) {
        error.restore();
        return nullptr;
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
    return PyObject_VectorcallMethod(m->general, args, nargsf, names);
}

PyObject* bind(PyObject* self, PyObject* group, PyObject*) {
    return group ? PyMethod_New(self, group) : Py_NewRef(self);
}

void destroy(PyObject* self) {
    auto* m = reinterpret_cast<Method*>(self);
    PyTypeObject* type = Py_TYPE(self);
    delete m->options;
    for (PyObject* held : {m->path, m->general, m->failed, m->done}) Py_XDECREF(held);
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject* name(PyObject*, void*) { return PyUnicode_FromString("allreduce"); }

PyGetSetDef properties[] = {{"__name__", name, nullptr, nullptr, nullptr},
                            {"__qualname__", name, nullptr, nullptr, nullptr},
                            {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(Method, call), READONLY, nullptr},
                         {nullptr, 0, 0, 0, nullptr}};

PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                       {Py_tp_descr_get, reinterpret_cast<void*>(bind)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                       {Py_tp_members, members},
                       {Py_tp_getset, properties},
                       {0, nullptr}};

PyType_Spec spec = {"unicomm._core.AllReduceMethod", sizeof(Method), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR |
                        Py_TPFLAGS_DISALLOW_INSTANTIATION,
                    slots};

}  // namespace

void bind_all_reduce_method(nb::module_& m) {
    PyObject* type = PyType_FromSpec(&spec);
    if (!type) throw nb::python_error();
    m.def(
        "all_reduce_method",
        [type](nb::type_object options, nb::object reduction_hash, nb::object unset_timeout,
               nb::object caller, nb::typed<nb::dict, nb::object, int> reductions, nb::object modes,
               nb::typed<nb::tuple, nb::str, nb::ellipsis> path, nb::str general, nb::str failed,
               nb::object done) {
            nb::object made = nb::steal(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type), 0));
            if (!made.is_valid()) throw nb::python_error();
            auto* method = reinterpret_cast<Method*>(made.ptr());
            method->call = call;
            method->options =
                new AllReduceOptions(options, std::move(reduction_hash), std::move(unset_timeout),
                                     std::move(caller), reductions, std::move(modes));
            method->path = path.release().ptr();
            method->general = general.release().ptr();
            method->failed = failed.release().ptr();
            method->done = done.release().ptr();
            return made;
        },
        nb::arg("options"), nb::arg("reduction_hash"), nb::arg("unset_timeout"), nb::arg("caller").none(),
        nb::arg("reductions"), nb::arg("modes"), nb::arg("path"), nb::arg("general"), nb::arg("failed"),
        nb::arg("done"));
}

}  // namespace unicomm
