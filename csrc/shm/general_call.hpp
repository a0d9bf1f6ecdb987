// A collective of the general path that the operations of a fast path run.
#pragma once
#include "base/bind.hpp"
#include "base/bind_fault.hpp"
#include "base/clock.hpp"
#include "operations/tensor.hpp"
#include "shm/group.hpp"

namespace unicomm {

// Reads the tensors, which are dense and checked, or None for a barrier; returns None or a fault.
template <class Operations>
nb::object run_general(Operations& operations, uint32_t code, int dtype, int red, int root, uint64_t count,
                       uint64_t extra, double timeout, nb::handle input, nb::handle output) {
    shm::Op op;
    op.code = code;
    op.dtype = static_cast<DType>(dtype);
    op.red = static_cast<Red>(red);
    op.root = root;
    op.count = count;
    op.extra = extra;
    op.deadline_ns = deadline_after(timeout);
    Tensor in, out;
    if (!input.is_none() && !read_tensor(input.ptr(), in)) throw nb::python_error();
    if (!output.is_none() && !read_tensor(output.ptr(), out)) throw nb::python_error();
    Fault fault;
    {
        GilReleased release;
        fault = operations.run(op, in, out);
    }
    return fault_tuple(fault);
}

}  // namespace unicomm
