// What the backend has made of a communicator of NCCL or RCCL, as a symmetric heap for Python.
#include <nanobind/stl/shared_ptr.h>

#include <memory>

#include "core/bind.hpp"
#include "symm/end.hpp"
#include "symm/nccl_windows.hpp"

namespace unicomm {

void bind_nccl_windows(nb::module_& m) {
    using namespace symm;
    m.def(
        "symm_nccl_windows",
        [](const nccl::Library& library, Address comm, Address window, Address memory, uint64_t bytes,
           int rank, int world, int signals, Address copy, Address query, Address last_error) {
            NcclHeap heap{
                &library, at<void>(comm), at<void>(window), at<char>(memory), bytes, rank, world, signals,
                {}};
            heap.device.copy = reinterpret_cast<decltype(heap.device.copy)>(copy);
            heap.device.query = reinterpret_cast<decltype(heap.device.query)>(query);
            heap.device.last_error = reinterpret_cast<decltype(heap.device.last_error)>(last_error);
            return std::make_shared<End>(nccl_windows_table(heap), open_nccl_windows(heap),
                                         std::make_shared<End::Blocks>());
        },
        nb::keep_alive<0, 1>(),
        "The heap on a window of memory of the library's, which it gives back in the end.");
    m.def("symm_nccl_windows_reserve", &nccl_windows_reserve,
          "Bytes of such a heap that nobody can allocate.");
}

}  // namespace unicomm
