// Binding of symmetric heaps on windows of NCCL or RCCL.
#include <nanobind/stl/shared_ptr.h>

#include <memory>

#include "base/bind.hpp"
#include "symm/domain.hpp"
#include "symm/tables/nccl_windows.hpp"

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
            return std::make_shared<SymmDomain>(nccl_windows_table(heap), open_nccl_windows(heap),
                                                std::make_shared<SymmDomain::Blocks>());
        },
        nb::keep_alive<0, 1>(),
        nb::sig(
            "def symm_nccl_windows(library: NcclLibrary, comm: int, window: int, memory: int, bytes: int, "
            "rank: int, world: int, signals: int, copy: int, query: int, last_error: int, /) -> SymmDomain"),
        "The symmetric heap on a window of the library's memory, which it frees at the end.");
    m.def("symm_nccl_windows_reserve", &nccl_windows_reserve, nb::arg("world"),
          "Bytes of such a heap that the table keeps for itself.");
}

}  // namespace unicomm
