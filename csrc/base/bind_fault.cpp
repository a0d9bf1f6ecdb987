// Faults for Python, and exceptions that a signal handler raised while an operation waited.
#include "base/bind_fault.hpp"

#include <nanobind/stl/vector.h>
#include <sys/syscall.h>

#include <utility>

namespace unicomm {
namespace {

// What a signal handler has raised (KeyboardInterrupt) while this thread waited. It ends the wait, and the
// operation raises it.
struct Interruption {
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    void keep() {  // the first one
        if (type) return PyErr_Clear();
        PyErr_Fetch(&type, &value, &trace);
    }
    void raise() {
        restore();
        throw nb::python_error();
    }
    // The awaited event has come nevertheless: the operation succeeds, and the exception follows it.
    void raise_later() {
        PyErr_NormalizeException(&type, &value, &trace);
        auto raise = [](void* error) {
            nb::object that = nb::steal(static_cast<PyObject*>(error));
            PyErr_SetObject(that.type().ptr(), that.ptr());
            return -1;
        };
        Py_XINCREF(value);
        if (value && Py_AddPendingCall(raise, value) != 0) Py_DECREF(value);
        restore();
        PyErr_Clear();
    }

  private:
    void restore() {
        PyErr_Restore(std::exchange(type, nullptr), std::exchange(value, nullptr),
                      std::exchange(trace, nullptr));
    }
};
thread_local Interruption interruption;

}  // namespace

// Python runs signal handlers only in its main thread, which is the first thread of the process (in a forked
// child, the thread that forked).
bool signal_has_raised() {
    if (syscall(SYS_gettid) != getpid() || !Py_IsInitialized()) return false;
    if (interruption.type) return true;
    PyGILState_STATE lock;
    with_end_of_python([&] { lock = PyGILState_Ensure(); });
    with_end_of_python([&] {
        if (PyErr_CheckSignals() != 0) interruption.keep();
    });
    PyGILState_Release(lock);
    return interruption.type != nullptr;
}

void keep_raised() { interruption.keep(); }

void raise_late_signals() {
    if (interruption.type) interruption.raise_later();
}

nb::object fault_tuple(const Fault& f) {
    if (!f) {
        raise_late_signals();
        return nb::none();
    }
    if (interruption.type) interruption.raise();
    nb::list claims;
    for (const Claim& c : f.claims) {
        claims.append(nb::make_tuple(c.rank, c.op, c.dtype, c.red, c.root, c.count, c.extra));
    }
    // Other processes wrote the names in it, and truncation may have cut a character in two.
    auto detail = nb::steal(PyUnicode_DecodeUTF8(f.detail.data(), Py_ssize_t(f.detail.size()), "replace"));
    if (!detail.is_valid()) throw nb::python_error();
    return nb::make_tuple(static_cast<int>(f.code), nb::cast(f.culprits), claims, detail, f.by);
}

}  // namespace unicomm
