// Reads the interpreter's frames. From Python 3.11 on, a call has a frame object only if somebody asks for
// it, and creating one costs more than the whole record. So this file reads the interpreter's own structures.
// Where it does not know them, it asks the public functions: slower, with the same result.
#include "recorder/call_stack.hpp"

#include <cstring>

#if !defined(Py_LIMITED_API) && PY_VERSION_HEX < 0x030C0000
#define UNICOMM_FRAMES_BY_HEADERS 1
#endif

#ifdef UNICOMM_FRAMES_BY_HEADERS
#include <frameobject.h>
#if PY_VERSION_HEX >= 0x030B0000
#define Py_BUILD_CORE 1
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#endif
#endif

namespace unicomm {
namespace {

#ifdef UNICOMM_FRAMES_BY_HEADERS

// Calls `take(code, position)` for each call until it returns false.
template <typename Take>
void each_call(Take take) {
#if PY_VERSION_HEX < 0x030B0000
    for (PyFrameObject* f = PyThreadState_Get()->frame; f; f = f->f_back) {
        auto* code = reinterpret_cast<PyObject*>(f->f_code);
        if (!take(code, reinterpret_cast<const char*>(code) + f->f_lasti * 2)) return;
    }
#else
    for (_PyInterpreterFrame* f = PyThreadState_Get()->cframe->current_frame; f; f = f->previous)
        if (!take(reinterpret_cast<PyObject*>(f->f_code), f->prev_instr)) return;
#endif
}

// Where the instructions of a code begin.
const void* first_instruction(PyObject* code) {
#if PY_VERSION_HEX < 0x030B0000
    return code;
#else
    return _PyCode_CODE(reinterpret_cast<PyCodeObject*>(code));
#endif
}

#else  // one build for several versions of Python

// Offsets in bytes, of 64-bit CPython with the GIL. tests/flight_recorder/recording/test_frame_layouts.py
// compares them with the headers of each version that it finds.
struct Layout {
    int version;       // of Python, without the last number
    int current;       // of the current frame in the thread state
    bool by_cframe;    // it is that of another structure, whose first member is the current frame
    int instructions;  // in a code
    int code = 0, previous = 8, at = 56, owner = 70;  // in a frame
    char owned_by_c = 3;                              // of frames that stand for a call of C code
};
constexpr Layout kLayouts[] = {{0x030C, 56, true, 192}, {0x030D, 72, false, 200}};

template <class T>
T read(const void* base, int offset) {
    T value;
    std::memcpy(&value, static_cast<const char*>(base) + offset, sizeof value);
    return value;
}

template <typename Take>
void each_known(const Layout& layout, Take take) {
    const void* frame = read<const void*>(PyThreadState_Get(), layout.current);
    if (layout.by_cframe) frame = read<const void*>(frame, 0);
    for (; frame; frame = read<const void*>(frame, layout.previous)) {
        if (read<char>(frame, layout.owner) == layout.owned_by_c) continue;
        if (!take(read<PyObject*>(frame, layout.code), read<const void*>(frame, layout.at))) return;
    }
}

// By the public functions. The position is one from the beginning of the code itself.
template <typename Take>
void each_public(Take take) {
    auto* frame = reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get()));
    while (frame && frame != Py_None) {
        auto* code = reinterpret_cast<PyObject*>(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame)));
        PyObject* at = PyObject_GetAttrString(frame, "f_lasti");
        bool more = take(code, reinterpret_cast<const char*>(code) + (at ? PyLong_AsLong(at) : 0));
        Py_XDECREF(at);
        Py_DECREF(code);  // the frame, which is running, holds it
        PyObject* back = more ? PyObject_GetAttrString(frame, "f_back") : nullptr;
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    PyErr_Clear();
}

// Returns the layout of this Python, nullptr if the public functions have to do. What it reads must be what
// they say, for the calls that this thread is in.
const Layout* find_layout() {
    const Layout* found = nullptr;
    for (const Layout& layout : kLayouts)
        if (layout.version == int(Py_Version >> 16)) found = &layout;
    PyObject* flags = PySys_GetObject("abiflags");
    const char* text = flags ? PyUnicode_AsUTF8AndSize(flags, nullptr) : nullptr;
    // Builds without the GIL have other structures.
    if (!text || std::strchr(text, 't') || sizeof(void*) != 8) found = nullptr;
    if (!found) return nullptr;
    CallStack told{};
    each_public([&](PyObject* code, const void* at) {
        told.calls[told.size] = {code, at};
        return ++told.size < kMostActivations;
    });
    int n = 0;
    bool same = true;
    each_known(*found, [&](PyObject* code, const void* at) {
        auto position =
            static_cast<const char*>(at) - reinterpret_cast<const char*>(code) - found->instructions;
        auto public_position =
            static_cast<const char*>(told.calls[n].at) - reinterpret_cast<const char*>(told.calls[n].code);
        same = n < told.size && code == told.calls[n].code && position == public_position;
        return same && ++n < told.size;
    });
    return same && n == told.size && n > 0 ? found : nullptr;
}

const Layout* layout() {
    static const Layout* const known = find_layout();
    return known;
}

template <typename Take>
void each_call(Take take) {
    if (const Layout* known = layout())
        each_known(*known, take);
    else
        each_public(take);
}

const void* first_instruction(PyObject* code) {
    const Layout* known = layout();
    return reinterpret_cast<const char*>(code) + (known ? known->instructions : 0);
}

#endif

}  // namespace

void read_call_stack(CallStack& stack) {
    int n = 0;
    uint64_t hash = 0;
    each_call([&](PyObject* code, const void* at) {
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
    auto at = static_cast<const char*>(call.at) - static_cast<const char*>(first_instruction(call.code));
    PyObject* ranges = PyObject_CallMethod(call.code, "co_lines", nullptr);
    int found = 0;
    while (PyObject* range = ranges && !found ? PyIter_Next(ranges) : nullptr) {
        int start = 0, end = 0;
        PyObject* line = nullptr;
        if (PyArg_ParseTuple(range, "iiO", &start, &end, &line) && start <= at && at < end && line != Py_None)
            found = int(PyLong_AsLong(line));
        Py_DECREF(range);
    }
    Py_XDECREF(ranges);
    PyErr_Clear();
    return found > 0 ? found : 0;
}

}  // namespace unicomm
