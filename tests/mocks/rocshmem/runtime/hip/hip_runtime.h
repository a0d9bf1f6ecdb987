// A mock of HIP's runtime, for tests where there is no AMD GPU: kernels run on the CPU, one thread of the
// grid after the other, in the streams of tests/mocks/nccl. Not AMD's; only what rocSHMEM's unit uses.
//
//     HIP_MOCK_WAVE=N        threads of a wave
//     HIP_MOCK_HOST_STREAM=1 the default stream is the host's: what is put there is done when a call returns
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

#pragma GCC visibility push(default)  // of another library: libamdhip64.so
#include "mock_streams.hpp"
#pragma GCC visibility pop

#define __host__
#define __device__
#define __global__

enum hipError_t { hipSuccess = 0, hipErrorInvalidValue = 1, hipErrorOutOfMemory = 2, hipErrorNotReady = 600 };
enum hipMemcpyKind { hipMemcpyHostToDevice = 1, hipMemcpyDeviceToHost = 2, hipMemcpyDefault = 4 };
enum hipDeviceAttribute_t { hipDeviceAttributeWarpSize = 87 };
constexpr unsigned hipEventDisableTiming = 2, hipStreamNonBlocking = 1, hipHostMallocDefault = 0;

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
inline thread_local dim3 threadIdx{0, 0, 0}, blockIdx{0, 0, 0}, blockDim, gridDim;
inline void __syncthreads() {}

namespace mock_hip {

[[noreturn]] inline void misused(const char* text) {
    std::fprintf(stderr, "the mock of HIP: %s\n", text);
    std::abort();
}

inline int wave() {
    const char* text = std::getenv("HIP_MOCK_WAVE");
    return text ? std::atoi(text) : 64;
}

inline void add(void* stream, std::function<void()> task) {
    static const bool of_the_host = std::getenv("HIP_MOCK_HOST_STREAM") != nullptr;
    auto found = mock_nccl::find_stream(stream);
    if (!found) misused("no such stream");
    found->enqueue(std::move(task));
    if (of_the_host && stream == nullptr) found->synchronize();
}

// What the threads of a work-group have done together, for those that must all do it.
struct Block {
    unsigned threads = 0;
    int calls = 0;  // of functions for whole work-groups, by all its threads
    bool entered = false;
};
inline thread_local Block block;

}  // namespace mock_hip

using hipStream_t = void*;
using hipEvent_t = void*;

extern "C" {
int mock_stream_create(void** stream);
int mock_stream_query(void* stream);
int mock_stream_synchronize(void* stream);
int mock_stream_wait_event(void* stream, void* event);
int mock_event_create(void** event, int timing);
int mock_event_record(void* event, void* stream);
}

inline const char* hipGetErrorString(hipError_t error) {
    return error == hipSuccess         ? "no error"
           : error == hipErrorNotReady ? "not ready"
                                       : "an error of the mock";
}
inline hipError_t hipGetLastError() { return hipSuccess; }
inline hipError_t hipGetDevice(int* device) { return *device = 0, hipSuccess; }
inline hipError_t hipSetDevice(int) { return hipSuccess; }
inline hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t, int) {
    return *value = mock_hip::wave(), hipSuccess;
}
inline hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned) {
    return hipError_t(mock_stream_create(stream));
}
inline hipError_t hipStreamSynchronize(hipStream_t stream) {
    return hipError_t(mock_stream_synchronize(stream));
}
inline hipError_t hipStreamQuery(hipStream_t stream) { return hipError_t(mock_stream_query(stream)); }
inline hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned) {
    return hipError_t(mock_event_create(event, 0));
}
inline hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
    return hipError_t(mock_event_record(event, stream));
}
inline hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned) {
    return hipError_t(mock_stream_wait_event(stream, event));
}
inline hipError_t hipDeviceSynchronize() { return hipStreamSynchronize(nullptr); }
inline hipError_t hipHostMalloc(void** memory, size_t bytes, unsigned) {
    return (*memory = std::calloc(bytes, 1)) ? hipSuccess : hipErrorOutOfMemory;
}
inline hipError_t hipMemset(void* memory, int value, size_t bytes) {
    return std::memset(memory, value, bytes), hipSuccess;
}
inline hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, hipMemcpyKind,
                                 hipStream_t stream) {
    mock_hip::add(stream, [=] { std::memcpy(to, from, bytes); });
    return hipSuccess;
}

template <class... P, class... A>
void hipLaunchKernelGGL(void (*kernel)(P...), dim3 grid, dim3 threads, size_t, hipStream_t stream,
                        A... arguments) {
    if (threads.x == 0 || threads.x % unsigned(mock_hip::wave()) != 0) {
        mock_hip::misused("a work-group is not made of whole waves");
    }
    mock_hip::add(stream, [=] {
        gridDim = grid, blockDim = threads;
        for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
            mock_hip::block = {threads.x, 0, false};
            for (threadIdx.x = 0; threadIdx.x < threads.x; ++threadIdx.x) kernel(P(arguments)...);
            if (mock_hip::block.calls % int(threads.x) != 0) {
                mock_hip::misused("what is for a whole work-group was not called by all its threads");
            }
        }
    });
}
