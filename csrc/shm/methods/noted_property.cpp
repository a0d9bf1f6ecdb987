// The type of the property. It calls the functions of the property in whose place it is put.
// clang-format off: structmember.h needs Python.h before it
#include "shm/methods/noted_property.hpp"

#include <structmember.h>
// clang-format on

namespace unicomm {

thread_local OptionNote option_note;

namespace {

struct Property {
    PyObject_HEAD PyObject *fget, *fset;
    const PyObject* OptionNote::* noted;
};

PyObject* get(PyObject* self, PyObject* owner, PyObject*) {
    if (!owner) return Py_NewRef(self);
    return call_one(reinterpret_cast<Property*>(self)->fget, owner);
}

int set(PyObject* self, PyObject* owner, PyObject* value) {
    if (!value) {
        PyErr_SetString(PyExc_AttributeError, "an option cannot be deleted");
        return -1;
    }
    auto* p = reinterpret_cast<Property*>(self);
    option_note.*p->noted = nullptr;
    PyObject* args[] = {owner, value};
    PyObject* result = PyObject_Vectorcall(p->fset, args, 2, nullptr);
    if (!result) return -1;
    Py_DECREF(result);
    if (option_note.owner != owner) option_note = {.owner = owner};
    option_note.*p->noted = value;
    return 0;
}

void destroy(PyObject* self) {
    auto* p = reinterpret_cast<Property*>(self);
    PyTypeObject* type = Py_TYPE(self);
    Py_XDECREF(p->fget);
    Py_XDECREF(p->fset);
    PyObject_Free(self);
    Py_DECREF(type);
}

PyMemberDef members[] = {{"fget", T_OBJECT, offsetof(Property, fget), READONLY, nullptr},
                         {"fset", T_OBJECT, offsetof(Property, fset), READONLY, nullptr},
                         {nullptr, 0, 0, 0, nullptr}};

PyType_Slot slots[] = {{Py_tp_descr_get, reinterpret_cast<void*>(get)},
                       {Py_tp_descr_set, reinterpret_cast<void*>(set)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                       {Py_tp_members, members},
                       {0, nullptr}};

PyType_Spec spec = {"unicomm._core.NotedProperty", sizeof(Property), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

}  // namespace

void bind_noted_property(nb::module_& m) {
    PyObject* type = PyType_FromSpec(&spec);
    if (!type) throw nb::python_error();
    m.def(
        "noted_property",
        [type](nb::object property, nb::str name) {
            nb::object made = nb::steal(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type), 0));
            if (!made.is_valid()) throw nb::python_error();
            auto* p = reinterpret_cast<Property*>(made.ptr());
            p->fget = nb::object(property.attr("fget")).release().ptr();
            p->fset = nb::object(property.attr("fset")).release().ptr();
            if (name.equal(nb::str("reduceOp")))
                p->noted = &OptionNote::reduction;
            else if (name.equal(nb::str("asyncOp")))
                p->noted = &OptionNote::async_op;
            else
                throw nb::value_error("no such option is noted");
            return made;
        },
        nb::arg("property"), nb::arg("name"),
        "The property of torch's AllreduceOptions, as one that notes what is set.");
}

}  // namespace unicomm
