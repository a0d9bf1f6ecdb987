// The type of handles, and the one handle that is used again.
// clang-format off: structmember.h needs Python.h before it
#include "operations/work.hpp"

#include <structmember.h>
// clang-format on

#include <utility>

namespace unicomm {
namespace {

struct WorkObject {
    PyObject_HEAD PyObject* name;
    unsigned long long seq;
    PyObject* attributes;  // a dict, made when the first attribute is set
    PyObject* weak;
};

WorkObject* work_of(PyObject* self) { return reinterpret_cast<WorkObject*>(self); }

int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(work_of(self)->name);
    Py_VISIT(work_of(self)->attributes);
    return 0;
}

int clear(PyObject* self) {
    Py_CLEAR(work_of(self)->name);
    Py_CLEAR(work_of(self)->attributes);
    return 0;
}

void destroy(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (work_of(self)->weak) PyObject_ClearWeakRefs(self);
    clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

PyMemberDef members[] = {{"name", T_OBJECT_EX, offsetof(WorkObject, name), 0, nullptr},
                         {"seq", T_ULONGLONG, offsetof(WorkObject, seq), 0, nullptr},
                         {"__dictoffset__", T_PYSSIZET, offsetof(WorkObject, attributes), READONLY, nullptr},
                         {"__weaklistoffset__", T_PYSSIZET, offsetof(WorkObject, weak), READONLY, nullptr},
                         {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef properties[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
                            {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                       {Py_tp_members, members},
                       {Py_tp_getset, properties},
                       {Py_tp_doc, const_cast<char*>("The name and the number of an operation.")},
                       {0, nullptr}};

PyType_Spec spec = {"unicomm._core.WorkBase", sizeof(WorkObject), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};

}  // namespace

CompletedWorks::CompletedWorks(nb::object type) : type_(std::move(type)) {
    auto size = nb::cast<Py_ssize_t>(type_.attr("__basicsize__"));
    if (size != Py_ssize_t(sizeof(WorkObject))) throw nb::type_error("a Work of another size");
}

nb::object CompletedWorks::make(nb::handle name, uint64_t seq) {
    // Nobody else has it, and nobody has left anything at it.
    bool free = last_.is_valid() && Py_REFCNT(last_.ptr()) == 1 && !work_of(last_.ptr())->weak &&
                !work_of(last_.ptr())->attributes;
    if (!free) {
        last_ = nb::steal(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type_.ptr()), 0));
        if (!last_.is_valid()) throw nb::python_error();
    }
    WorkObject* work = work_of(last_.ptr());
    if (work->name != name.ptr()) {
        PyObject* old = std::exchange(work->name, Py_NewRef(name.ptr()));
        Py_XDECREF(old);
    }
    work->seq = seq;
    return last_;
}

void bind_work(nb::module_& m) {
    PyObject* type = PyType_FromSpec(&spec);
    if (!type) throw nb::python_error();
    m.attr("WorkBase") = nb::steal(type);
}

}  // namespace unicomm
