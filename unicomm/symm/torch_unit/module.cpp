// torch's symmetric memory on CPU tensors, which needs the ABI of the torch that is installed. Built on
// demand by `unicomm build torch-bridge`; unicomm/symm/in_torch.py loads it.
#include "experts.hpp"

namespace unicomm_torch {
namespace {

// Boxed: a torch with CUDA has kernels of its own, and dies of a second one whose C++ type differs by as much
// as a reference, which changes from release to release. What counts is the schema; an operation that this
// torch lacks, or declares otherwise, has no kernel.
template <auto F>
void boxed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    using Pointer = c10::CompileTimeFunctionPointer<std::remove_pointer_t<decltype(F)>, F>;
    using Functor = typename c10::impl::WrapFunctionIntoFunctor<Pointer>::type;
    static Functor functor;
    c10::impl::make_boxed_from_unboxed_functor<Functor, false>::call(&functor, op, keys, stack);
}

template <auto F>
void impl(torch::Library& library, const char* name) {
    auto declared = c10::Dispatcher::singleton().findSchema({std::string("symm_mem::") + name, ""});
    if (!declared) return;
    auto inferred = c10::detail::inferFunctionSchemaFromFunctor<decltype(F)>();
    if (c10::findSchemaDifferences(*inferred, declared->schema())) return;
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&boxed<F>>());
}

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
    impl<one_shot_all_reduce>(m, "one_shot_all_reduce");
    impl<one_shot_all_reduce_out>(m, "one_shot_all_reduce_out");
    impl<one_shot_all_reduce_copy>(m, "one_shot_all_reduce_copy");
    impl<one_shot_all_reduce_copy_out>(m, "one_shot_all_reduce_copy_out");
    impl<two_shot_all_reduce_>(m, "two_shot_all_reduce_");
    impl<two_shot_all_reduce_out>(m, "two_shot_all_reduce_out");
    impl<reduce_scatter_out>(m, "reduce_scatter_out");
    // What multicast does, without it.
    impl<two_shot_all_reduce_>(m, "multimem_all_reduce_");
    impl<one_shot_all_reduce>(m, "multimem_one_shot_all_reduce");
    impl<one_shot_all_reduce_out>(m, "multimem_one_shot_all_reduce_out");
    impl<one_shot_reduce_out>(m, "multimem_one_shot_reduce_out");
    impl<all_gather_out>(m, "multimem_all_gather_out");
    impl<memset32_>(m, "memset32_");
    impl<stream_write_value32_>(m, "stream_write_value32_");
    impl<put>(m, "nvshmem_put");
    impl<get>(m, "nvshmem_get");
    impl<put_with_signal>(m, "nvshmem_put_with_signal");
    impl<wait_for_signal>(m, "nvshmem_wait_for_signal");
    impl<broadcast>(m, "nvshmem_broadcast");
    impl<all_to_all>(m, "nvshmem_all_to_all");
    impl<all_to_all_vdev>(m, "all_to_all_vdev");
    impl<all_to_all_vdev_2d>(m, "all_to_all_vdev_2d");
    impl<all_to_all_vdev_2d_offset>(m, "all_to_all_vdev_2d_offset");
    impl<tile_reduce>(m, "tile_reduce");
    impl<multi_root_tile_reduce>(m, "multi_root_tile_reduce");
    impl<put>(m, "nccl_put");
    impl<get>(m, "nccl_get");
    impl<handle_put_signal>(m, "nccl_put_signal");
    impl<reduce_scatter_offset>(m, "nccl_reduce_scatter_offset");
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
        impl<handle_wait_signal>(more, "nccl_wait_signal");
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
