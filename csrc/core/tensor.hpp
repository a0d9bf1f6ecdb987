// A tensor as the core sees it: read from the Python handle through DLPack's C exchange API
// (about 60 ns), or through the tensor's methods where torch is too old to offer that.
#pragma once
#include <cstdint>

#include "core/dtype.hpp"

typedef struct _object PyObject;  // as Python.h has it, which the code without Python does not need

namespace unicomm {

struct Tensor {
    void* data = nullptr;
    int64_t numel = 0;
    int64_t bytes = 0;
    const int64_t* shape = nullptr;  // valid while the Python object lives and is not resized
    int32_t ndim = 0;
    int32_t device_type = 0;  // DLPack's numbers: 1 is the CPU
    DType dtype = DType::kNone;
    bool contiguous = true;
};

// False with a Python exception set when the object is no tensor. The GIL must be held.
bool read_tensor(PyObject* object, Tensor& out);
// Whether the object is a tensor whose type offers the C exchange API.
bool has_exchange_api(PyObject* object);

}  // namespace unicomm
