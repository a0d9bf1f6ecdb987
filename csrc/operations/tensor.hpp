// A tensor as the core sees it. It is read from the Python object through DLPack's C exchange API (about 60
// ns), or through the tensor's methods if torch does not offer that API.
#pragma once
#include <cstdint>

#include "operations/dtype.hpp"

typedef struct _object PyObject;  // declared here for the files that do not include Python.h

namespace unicomm {

// Shapes that a thread keeps of what it has read without that API: the ones that were read last.
constexpr int kShapes = 4;

struct Tensor {
    void* data = nullptr;
    int64_t numel = 0;
    int64_t bytes = 0;
    const int64_t* shape = nullptr;  // valid while the object lives and is not resized, or see `kShapes`
    int32_t ndim = 0;
    int32_t device_type = 0;  // as in DLPack: 1 is the CPU
    DType dtype = DType::kNone;
    bool contiguous = true;
};

// Returns False, with a Python exception set, if the object is no tensor. The GIL must be held.
bool read_tensor(PyObject* object, Tensor& out);
// Returns whether the type of the object offers the C exchange API.
bool has_exchange_api(PyObject* object);

}  // namespace unicomm
