// The Python type of native methods.
// clang-format off: structmember.h needs Python.h before it
#include "base/native_method.hpp"

#include <structmember.h>
// clang-format on

#include <memory>

namespace unicomm {
namespace {

struct MethodObject {
    PyObject_HEAD vectorcallfunc call;
    NativeMethod* method;
};

NativeMethod& method_of(PyObject* self) { return *reinterpret_cast<MethodObject*>(self)->method; }

PyObject* call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
    NativeMethod& method = method_of(self);
    try {
        nb::object result = method.take(args, size_t(PyVectorcall_NARGS(nargsf)), names);
        if (result.is_valid()) return result.release().ptr();
    } catch (nb::python_error& error) {
        error.restore();
        return nullptr;
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
    return method.pass_on(args, nargsf, names);
}

PyObject* bind(PyObject* self, PyObject* owner, PyObject*) {
    nb::handle function = method_of(self).looked_up();
    if (!function.is_valid()) function = self;
    if (!owner) return Py_NewRef(function.ptr());
    static PyObject* const method_type =
        nb::object(nb::module_::import_("types").attr("MethodType")).release().ptr();
    PyObject* parts[] = {function.ptr(), owner};
    return PyObject_Vectorcall(method_type, parts, 2, nullptr);
}

PyObject* name(PyObject* self, void*) { return PyUnicode_FromString(method_of(self).name()); }

void destroy(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    delete &method_of(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(MethodObject, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef properties[] = {{"__name__", name, nullptr, nullptr, nullptr},
                            {"__qualname__", name, nullptr, nullptr, nullptr},
                            {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                       {Py_tp_descr_get, reinterpret_cast<void*>(bind)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                       {Py_tp_members, members},
                       {Py_tp_getset, properties},
                       {0, nullptr}};

PyType_Spec spec = {"unicomm._core.NativeMethod", sizeof(MethodObject), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR |
                        Py_TPFLAGS_DISALLOW_INSTANTIATION,
                    slots};

}  // namespace

nb::object method_object(NativeMethod* method) {
    static PyObject* type = PyType_FromSpec(&spec);
    std::unique_ptr<NativeMethod> owned(method);
    if (!type) throw nb::python_error();
    nb::object made = nb::steal(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type), 0));
    if (!made.is_valid()) throw nb::python_error();
    auto* object = reinterpret_cast<MethodObject*>(made.ptr());
    object->call = call;
    object->method = owned.release();
    return made;
}

}  // namespace unicomm
