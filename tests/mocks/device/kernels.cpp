// The kernels for the host, and how they are launched: see device.hpp.
#define SYMM_HOST "device.hpp"
#include "kernels.cu"

namespace {

struct Launch {
    void (*kernel)(Args);
    unsigned blocks, threads;
    Args args;
};

}  // namespace

extern "C" {

// Something for `mock_run`, as often as wanted: a graph may be replayed. It is never given back.
__attribute__((visibility("default"))) void* mock_launch(void (*kernel)(Args), unsigned blocks,
                                                           unsigned threads, const Int* args) {
    auto* launch = new Launch{kernel, blocks, threads, {}};
    std::memcpy(&launch->args, args, sizeof launch->args);
    return launch;
}

__attribute__((visibility("default"))) unsigned mock_args() { return sizeof(Args) / sizeof(Int); }

__attribute__((visibility("default"))) void mock_run(void* given) {
    const auto& launch = *static_cast<Launch*>(given);
    gridDim.x = launch.blocks, blockDim.x = launch.threads;
    for (unsigned i = 0; i < launch.blocks; ++i) {
        blockIdx.x = i;
        fibers::run(launch.threads, [&] { launch.kernel(launch.args); });
    }
}

}  // extern "C"
