// Reads numpy arrays by the buffer protocol: no tensor is made, and numpy's headers are not needed.
#include "operations/array.hpp"

#include <Python.h>

#include <algorithm>

namespace unicomm {
namespace {

constexpr int kMostDims = 64;

// The letters of Python's struct module. What depends on the machine is told by the size.
DType dtype_of(const char* format, Py_ssize_t size) {
    if (!format || format[0] == '\0' || format[1] != '\0') return DType::kOther;
    DType found = DType::kOther;
    switch (format[0]) {
        case '?':
            found = DType::kBool;
            break;
        case 'e':
            found = DType::kFloat16;
            break;
        case 'f':
            found = DType::kFloat32;
            break;
        case 'd':
            found = DType::kFloat64;
            break;
        case 'b':
            found = DType::kInt8;
            break;
        case 'B':
            found = DType::kUInt8;
            break;
        case 'h':
            found = DType::kInt16;
            break;
        case 'H':
            found = DType::kUInt16;
            break;
        case 'i':
        case 'l':
        case 'q':
            found = size == 8 ? DType::kInt64 : DType::kInt32;
            break;
        case 'I':
        case 'L':
        case 'Q':
            found = size == 8 ? DType::kUInt64 : DType::kUInt32;
            break;
        default:
            break;
    }
    return dtype_bytes(found) == size ? found : DType::kOther;
}

bool is_contiguous(const Py_buffer& view) {
    Py_ssize_t expected = view.itemsize;
    for (int i = view.ndim - 1; i >= 0; --i) {
        if (view.shape[i] == 0) return true;
        if (view.shape[i] != 1 && view.strides[i] != expected) return false;
        expected *= view.shape[i];
    }
    return true;
}

// The shapes that were read last: those of numpy's buffers end with the buffers.
int64_t* room_for_shape() {
    thread_local int64_t shapes[kShapes][kMostDims];
    thread_local int last = 0;
    return shapes[last = (last + 1) % kShapes];
}

}  // namespace

bool read_array(PyObject* object, bool writes, Tensor& out) {
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_FORMAT | PyBUF_STRIDES | (writes ? PyBUF_WRITABLE : 0)) !=
        0) {
        PyErr_Clear();
        return false;
    }
    out.dtype = dtype_of(view.format, view.itemsize);
    bool known = out.dtype != DType::kOther && view.ndim <= kMostDims;
    if (known) {
        int64_t* shape = room_for_shape();
        std::copy_n(view.shape, view.ndim, shape);
        out.data = view.buf;
        out.bytes = view.len;
        out.numel = view.len / view.itemsize;
        out.shape = shape;
        out.ndim = view.ndim;
        out.device_type = 1;
        out.contiguous = is_contiguous(view);
    }
    PyBuffer_Release(&view);
    return known;
}

}  // namespace unicomm
