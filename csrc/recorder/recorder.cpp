// Finds the caller of an operation.
#include "recorder/recorder.hpp"

#include <atomic>
#include <string_view>

namespace unicomm {
namespace {

std::string own_folder, library_folder;
Recorder* current = nullptr;
std::atomic<uint64_t> op_ids{0};

std::string_view text_of(PyObject* text) {
    Py_ssize_t n = 0;
    const char* s = text ? PyUnicode_AsUTF8AndSize(text, &n) : nullptr;
    if (!s) {
        PyErr_Clear();
        return "?";
    }
    return {s, static_cast<size_t>(n)};
}

PyObject* attribute(PyObject* object, const char* name) {
    PyObject* value = PyObject_GetAttrString(object, name);
    if (!value) PyErr_Clear();
    return value;
}

}  // namespace

uint64_t next_op_id() { return op_ids.fetch_add(1); }

Recorder::~Recorder() {
    if (current == this) current = nullptr;
}

void Recorder::set_folders(const std::string& own, const std::string& library) {
    own_folder = own;
    library_folder = library;
}

void Recorder::make_current() { current = this; }

void Recorder::detach_after_fork() {
    if (current) current->writer.detach_after_fork();
}

uint32_t Recorder::caller_frame() {
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    uint32_t library_site = 0;
    while (frame) {
        PyCodeObject* code = PyFrame_GetCode(frame);
        Whose whose = whose_is(code);
        uint32_t id = 0;
        if (whose == Whose::kUser || (whose == Whose::kLibrary && library_site == 0)) id = site(code, frame);
        Py_DECREF(code);
        if (whose == Whose::kUser) {
            Py_DECREF(frame);
            return id;
        }
        if (whose == Whose::kLibrary && library_site == 0) library_site = id;
        PyFrameObject* back = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = back;
    }
    return library_site;
}

Recorder::Whose Recorder::whose_is(PyCodeObject* code) {
    auto found = whose_.find(code);
    if (found != whose_.end()) return found->second;
    PyObject* name = attribute(reinterpret_cast<PyObject*>(code), "co_filename");
    std::string_view file = text_of(name);
    Whose whose = Whose::kUser;
    if (!library_folder.empty() && file.starts_with(library_folder)) whose = Whose::kLibrary;
    if (!own_folder.empty() && file.starts_with(own_folder)) whose = Whose::kOwn;
    if (file.starts_with("<frozen")) whose = Whose::kOwn;  // runpy and importlib
    Py_XDECREF(name);
    Py_INCREF(code);  // the address is the key
    whose_.emplace(code, whose);
    return whose;
}

uint32_t Recorder::site(PyCodeObject* code, PyFrameObject* frame) {
    CallSite key{code, PyFrame_GetLasti(frame)};
    auto found = sites_.find(key);
    if (found != sites_.end()) return found->second;
    PyObject* file = attribute(reinterpret_cast<PyObject*>(code), "co_filename");
    PyObject* name = attribute(reinterpret_cast<PyObject*>(code), "co_qualname");
    if (!name) name = attribute(reinterpret_cast<PyObject*>(code), "co_name");
    uint32_t id =
        writer.add_frame(text_of(file), text_of(name), static_cast<uint32_t>(PyFrame_GetLineNumber(frame)));
    Py_XDECREF(file);
    Py_XDECREF(name);
    Py_INCREF(code);
    sites_.emplace(key, id);
    return id;
}

void describe(const Tensor& t, bool first, uint64_t& numel, uint8_t& dtype, uint8_t& ndim, int64_t* dims) {
    numel += static_cast<uint64_t>(t.numel);
    if (!first) return;
    dtype = static_cast<uint8_t>(t.dtype);
    ndim = static_cast<uint8_t>(t.ndim < 255 ? t.ndim : 255);
    for (int d = 0; d < t.ndim && d < ring::kMaxDims; ++d) dims[d] = t.shape[d];
}

}  // namespace unicomm
