// A numpy array as the core sees it, read by the buffer protocol.
#pragma once
#include "operations/tensor.hpp"

namespace unicomm {

// Reads a numpy array whose elements are numbers in the machine's byte order, not complex, or bools. Returns
// False, with no exception set, for any other one, and for a read-only one if `writes`. The GIL must be held.
// `out.shape` is valid until the thread has read `kShapes` more arrays.
bool read_array(PyObject* object, bool writes, Tensor& out);

}  // namespace unicomm
