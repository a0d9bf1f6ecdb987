// Symmetric memory of torch on CPU tensors, which needs the ABI of the installed torch. Built on demand by
// `unicomm build torch-bridge`; unicomm/symm/in_torch.py loads it.
#include <pybind11/stl.h>

#include "experts.hpp"
#include "one_sided.hpp"

namespace unicomm_torch {
namespace {

// Boxed, because a torch with CUDA has kernels of its own, and aborts if a second kernel has another C++
// type; even a reference counts, and they change between releases. Only the schema matters then. An operation
// that this torch lacks, or declares differently, gets no kernel.
template <auto F>
void boxed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    using Pointer = c10::CompileTimeFunctionPointer<std::remove_pointer_t<decltype(F)>, F>;
    using Functor = typename c10::impl::WrapFunctionIntoFunctor<Pointer>::type;
    static Functor functor;
    c10::impl::make_boxed_from_unboxed_functor<Functor, false>::call(&functor, op, keys, stack);
}

// A kernel, its schema in C++, and the operation of torch.ops.symm_mem that it implements.
struct Kernel {
    const char* name;
    std::unique_ptr<c10::FunctionSchema> (*schema)();
    torch::CppFunction (*function)();
    c10::DispatchKey key = c10::DispatchKey::CPU;
};

template <auto F>
Kernel kernel(const char* name) {
    return {name, [] { return c10::detail::inferFunctionSchemaFromFunctor<decltype(F)>(); },
            [] { return torch::CppFunction::makeFromBoxedFunction<&boxed<F>>(); }};
}

// No tensor argument tells CPU from GPU; the handle does: it is one of ours or of torch.
void wait_for_own_signal(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    auto memory = torch::jit::peek(*stack, 0, 2).toCustomClass<sm::SymmetricMemory>();
    if (c10::dynamic_intrusive_pointer_cast<Handle>(memory)) {
        boxed<handle_wait_signal>(op, keys, stack);
    } else {
        op.redispatchBoxed(
            keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect),
            stack);
    }
}

const std::vector<Kernel>& kernels() {
    static const std::vector<Kernel> all{
        kernel<one_shot_all_reduce>("one_shot_all_reduce"),
        kernel<one_shot_all_reduce_out>("one_shot_all_reduce_out"),
        kernel<one_shot_all_reduce_copy>("one_shot_all_reduce_copy"),
        kernel<one_shot_all_reduce_copy_out>("one_shot_all_reduce_copy_out"),
        kernel<two_shot_all_reduce_>("two_shot_all_reduce_"),
        kernel<two_shot_all_reduce_out>("two_shot_all_reduce_out"),
        kernel<reduce_scatter_out>("reduce_scatter_out"),
        // What multicast does, without multicast.
        kernel<two_shot_all_reduce_>("multimem_all_reduce_"),
        kernel<one_shot_all_reduce>("multimem_one_shot_all_reduce"),
        kernel<one_shot_all_reduce_out>("multimem_one_shot_all_reduce_out"),
        kernel<one_shot_reduce_out>("multimem_one_shot_reduce_out"),
        kernel<all_gather_out>("multimem_all_gather_out"),
        kernel<copy_to_all>("memcpy_to_multicast_"),
        kernel<memset32_>("memset32_"),
        kernel<stream_write_value32_>("stream_write_value32_"),
        kernel<async_input_mm>("_async_input_mm"),
        kernel<put>("nvshmem_put"),
        kernel<get>("nvshmem_get"),
        kernel<get_out>("nvshmem_get_out"),
        kernel<put_with_signal>("nvshmem_put_with_signal"),
        kernel<wait_for_signal>("nvshmem_wait_for_signal"),
        kernel<broadcast>("nvshmem_broadcast"),
        kernel<all_to_all>("nvshmem_all_to_all"),
        kernel<all_to_all_vdev>("all_to_all_vdev"),
        kernel<all_to_all_vdev_2d>("all_to_all_vdev_2d"),
        kernel<all_to_all_vdev_2d_offset>("all_to_all_vdev_2d_offset"),
        kernel<tile_reduce>("tile_reduce"),
        kernel<multi_root_tile_reduce>("multi_root_tile_reduce"),
        kernel<put>("nccl_put"),
        kernel<get>("nccl_get"),
        kernel<get_out>("nccl_get_out"),
        kernel<put_with_value>("nccl_put_with_signal"),
        kernel<wait_for_value>("nccl_wait_for_signal"),
        kernel<handle_put_signal>("nccl_put_signal"),
        {"nccl_wait_signal", kernel<handle_wait_signal>("").schema,
         [] { return torch::CppFunction::makeFromBoxedFunction<&wait_for_own_signal>(); },
         c10::DispatchKey::BackendSelect},
        kernel<all_to_all_nd>("nccl_all_to_all_nd"),
        kernel<reduce_scatter_offset>("nccl_reduce_scatter_offset"),
    };
    return all;
}

// Returns why the kernel does not fit this torch; empty if it does.
std::string misfit(const Kernel& kernel) {
    auto found = c10::Dispatcher::singleton().findSchema({std::string("symm_mem::") + kernel.name, ""});
    if (!found) return "this torch does not declare it";
    if (auto otherwise = c10::findSchemaDifferences(*kernel.schema(), found->schema()))
        return "this torch declares it otherwise: " + *otherwise;
    return "";
}

// Returns all kernels, each with the reason why it does not fit this torch, or an empty text. Once the
// kernels are registered, the state before that is returned.
std::map<std::string, std::string> operators(bool keep) {
    static std::optional<std::map<std::string, std::string>> kept;
    if (kept) return *kept;
    std::map<std::string, std::string> made;
    for (auto& kernel : kernels()) made[kernel.name] = misfit(kernel);
    if (keep) kept = made;
    return made;
}

void register_kernels() {
    using torch::Library;
    static Library cpu(Library::IMPL, "symm_mem", c10::DispatchKey::CPU, __FILE__, __LINE__);
    static Library select(Library::IMPL, "symm_mem", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
    auto misfits = operators(true);
    for (auto& kernel : kernels()) {
        if (!misfits.at(kernel.name).empty()) continue;
        (kernel.key == c10::DispatchKey::CPU ? cpu : select).impl(kernel.name, kernel.function());
    }
}

// To be called once per process. The first name becomes the default of CPU tensors. Names for which this
// torch already has a backend are left out.
std::vector<std::string> install(const std::vector<std::string>& names, py::object exchange,
                                 py::object number_of) {
    hooks() = {std::move(exchange), std::move(number_of)};
    register_kernels();
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

PYBIND11_MODULE(unicomm_torch_symm, m) {
    m.def("install", &unicomm_torch::install);
    m.def("operators", [] { return unicomm_torch::operators(false); });
}
