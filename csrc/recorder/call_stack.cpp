// Reads the interpreter's frames. From Python 3.11 on, a call has a frame object only if somebody asks for
// it, and creating one costs more than the whole record. So this file reads the interpreter's own structures,
// from the headers of the version that it is compiled for. Versions whose structures it does not know are
// read by the public functions: slower, with the same result.
#include "recorder/call_stack.hpp"

#include <frameobject.h>

#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)
#define UNICOMM_READS_FRAMES 1
#define Py_BUILD_CORE 1
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#endif

namespace unicomm {
namespace {

// Calls `take(code, position)` for each call until it returns false.
template <typename Take>
void each_call(Take take) {
#if PY_VERSION_HEX < 0x030B0000
    for (PyFrameObject* f = PyThreadState_Get()->frame; f; f = f->f_back) {
        if (!take(f->f_code, reinterpret_cast<const char*>(f->f_code) + f->f_lasti)) return;
    }
#elif defined(UNICOMM_READS_FRAMES)
#if PY_VERSION_HEX >= 0x030D0000
    for (_PyInterpreterFrame* f = PyThreadState_Get()->current_frame; f; f = f->previous) {
        if (f->owner == FRAME_OWNED_BY_CSTACK) continue;
        if (!take(_PyFrame_GetCode(f), f->instr_ptr)) return;
    }
#else
    for (_PyInterpreterFrame* f = PyThreadState_Get()->cframe->current_frame; f; f = f->previous) {
#if PY_VERSION_HEX >= 0x030C0000
        if (f->owner == FRAME_OWNED_BY_CSTACK) continue;
#endif
        if (!take(f->f_code, f->prev_instr)) return;
    }
#endif
#else
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    while (frame) {
        PyCodeObject* code = PyFrame_GetCode(frame);
        bool more = take(code, reinterpret_cast<const char*>(code) + PyFrame_GetLasti(frame));
        Py_DECREF(code);  // the frame, which is running, holds it
        PyFrameObject* back = more ? PyFrame_GetBack(frame) : nullptr;
        Py_DECREF(frame);
        frame = back;
    }
#endif
}

}  // namespace

void read_call_stack(CallStack& stack) {
    int n = 0;
    uint64_t hash = 0;
    each_call([&](PyCodeObject* code, const void* at) {
        stack.calls[n] = {code, at};
        uint64_t word = reinterpret_cast<uintptr_t>(code) + 31 * reinterpret_cast<uintptr_t>(at);
        hash = (hash ^ word) * 0x9E37'79B9'7F4A'7C15;
        hash ^= hash >> 32;
        return ++n < kMostActivations;
    });
    stack.size = n;
    stack.hash = hash;
}

int line_of(const Activation& call) {
#if PY_VERSION_HEX < 0x030B0000
    auto offset = static_cast<const char*>(call.at) - reinterpret_cast<const char*>(call.code);
    int line = PyCode_Addr2Line(call.code, static_cast<int>(offset) * 2);
#elif defined(UNICOMM_READS_FRAMES)
    auto offset = static_cast<const _Py_CODEUNIT*>(call.at) - _PyCode_CODE(call.code);
    int line = PyCode_Addr2Line(call.code, static_cast<int>(offset) * int{sizeof(_Py_CODEUNIT)});
#else
    auto offset = static_cast<const char*>(call.at) - reinterpret_cast<const char*>(call.code);
    int line = PyCode_Addr2Line(call.code, static_cast<int>(offset));
#endif
    return line > 0 ? line : 0;
}

}  // namespace unicomm
