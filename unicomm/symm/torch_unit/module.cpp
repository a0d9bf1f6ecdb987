// torch's symmetric memory on CPU tensors, which needs the ABI of the torch that is installed. Built on
// demand by `unicomm build torch-bridge`; unicomm/symm/in_torch.py loads it.
#include "experts.hpp"

namespace unicomm_torch {
namespace {

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
    m.impl("one_shot_all_reduce", one_shot_all_reduce);
    m.impl("one_shot_all_reduce_out", one_shot_all_reduce_out);
    m.impl("one_shot_all_reduce_copy", one_shot_all_reduce_copy);
    m.impl("one_shot_all_reduce_copy_out", one_shot_all_reduce_copy_out);
    m.impl("two_shot_all_reduce_", two_shot_all_reduce_);
    m.impl("two_shot_all_reduce_out", two_shot_all_reduce_out);
    m.impl("reduce_scatter_out", reduce_scatter_out);
    // What multicast does, without it.
    m.impl("multimem_all_reduce_", two_shot_all_reduce_);
    m.impl("multimem_one_shot_all_reduce", one_shot_all_reduce);
    m.impl("multimem_one_shot_all_reduce_out", one_shot_all_reduce_out);
    m.impl("multimem_one_shot_reduce_out", one_shot_reduce_out);
    m.impl("multimem_all_gather_out", all_gather_out);
    m.impl("memset32_", memset32_);
    m.impl("stream_write_value32_", stream_write_value32_);
    m.impl("nvshmem_put", put);
    m.impl("nvshmem_get", get);
    m.impl("nvshmem_put_with_signal", put_with_signal);
    m.impl("nvshmem_wait_for_signal", wait_for_signal);
    m.impl("nvshmem_broadcast", broadcast);
    m.impl("nvshmem_all_to_all", all_to_all);
    m.impl("all_to_all_vdev", all_to_all_vdev);
    m.impl("all_to_all_vdev_2d", all_to_all_vdev_2d);
    m.impl("all_to_all_vdev_2d_offset", all_to_all_vdev_2d_offset);
    m.impl("tile_reduce", tile_reduce);
    m.impl("multi_root_tile_reduce", multi_root_tile_reduce);
    m.impl("nccl_put", put);
    m.impl("nccl_get", get);
    m.impl("nccl_put_signal", handle_put_signal);
    m.impl("nccl_reduce_scatter_offset", reduce_scatter_offset);
}

// The first name is the default of CPU tensors; those that this torch has a backend for already are left out.
std::vector<std::string> install(const std::vector<std::string>& names, py::object exchange) {
    exchange_function() = std::move(exchange);
    // It has no tensor to be dispatched by. Torch with CUDA has a kernel of its own.
    auto wait = c10::Dispatcher::singleton().findSchema({"symm_mem::nccl_wait_signal", ""});
    if (wait && !wait->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) &&
        !wait->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) {
        static torch::Library more(torch::Library::IMPL, "symm_mem",
                                   c10::DispatchKey::CompositeExplicitAutograd, __FILE__, __LINE__);
        more.impl("nccl_wait_signal", handle_wait_signal);
    }
    std::vector<std::string> taken;
    for (auto& name : names) {
        auto allocator = c10::make_intrusive<Allocator>(name);
        try {
            sm::register_availability(name, allocator);
        } catch (const c10::Error&) {
            continue;
        }
        if (taken.empty() && !sm::has_allocator(c10::kCPU)) sm::register_allocator(c10::kCPU, allocator);
        taken.push_back(name);
    }
    return taken;
}

}  // namespace
}  // namespace unicomm_torch

PYBIND11_MODULE(unicomm_torch_symm, m) { m.def("install", &unicomm_torch::install); }
