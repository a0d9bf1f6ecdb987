// A double of HIP's runtime, for tests where there is no AMD GPU: kernels run on the CPU, one thread of the
// grid after the other; a stream is a thread that takes one thing after the other. Not AMD's; only what
// rocSHMEM's unit uses.
#pragma once
#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

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

namespace hip_double {

[[noreturn]] inline void misused(const char* text) {
    std::fprintf(stderr, "the double of HIP: %s\n", text);
    std::abort();
}

inline int wave() {
    const char* text = std::getenv("HIP_DOUBLE_WAVE");
    return text ? std::atoi(text) : 64;
}

struct Stream {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> tasks;
    bool busy = false;

    Stream() {
        std::thread([this] { run(); }).detach();
    }
    void run() {
        for (std::unique_lock lock(mutex);;) {
            changed.wait(lock, [this] { return !tasks.empty(); });
            auto task = std::move(tasks.front());
            tasks.pop_front();
            busy = true;
            lock.unlock();
            task();
            lock.lock();
            busy = false;
            changed.notify_all();
        }
    }
    void add(std::function<void()> task) {
        std::lock_guard lock(mutex);
        tasks.push_back(std::move(task));
        changed.notify_all();
    }
    bool idle() {
        std::lock_guard lock(mutex);
        return tasks.empty() && !busy;
    }
    void wait() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return tasks.empty() && !busy; });
    }
};

struct Event {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t recorded = 0, reached = 0;
};

// What the threads of a work-group have done together, for those that must all do it.
struct Block {
    unsigned threads = 0;
    int calls = 0;  // of functions for whole work-groups, by all its threads
    bool entered = false;
};
inline thread_local Block block;

inline Stream* default_stream() {
    static Stream* stream = new Stream;  // outlives all: its thread never ends
    return stream;
}

}  // namespace hip_double

using hipStream_t = hip_double::Stream*;
inline hipStream_t hip_double_of(hipStream_t stream) {
    return stream ? stream : hip_double::default_stream();
}

inline const char* hipGetErrorString(hipError_t error) {
    return error == hipSuccess         ? "no error"
           : error == hipErrorNotReady ? "not ready"
                                       : "an error of the double";
}
inline hipError_t hipGetLastError() { return hipSuccess; }
inline hipError_t hipGetDevice(int* device) { return *device = 0, hipSuccess; }
inline hipError_t hipSetDevice(int) { return hipSuccess; }
inline hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t, int) {
    return *value = hip_double::wave(), hipSuccess;
}
inline hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned) {
    return *stream = new hip_double::Stream, hipSuccess;
}
inline hipError_t hipStreamSynchronize(hipStream_t stream) {
    return hip_double_of(stream)->wait(), hipSuccess;
}
inline hipError_t hipStreamQuery(hipStream_t stream) {
    return hip_double_of(stream)->idle() ? hipSuccess : hipErrorNotReady;
}
using hipEvent_t = hip_double::Event*;
inline hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned) {
    return *event = new hip_double::Event, hipSuccess;
}
inline hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
    std::lock_guard lock(event->mutex);
    hip_double_of(stream)->add([event, turn = ++event->recorded] {
        std::lock_guard reached(event->mutex);
        event->reached = std::max(event->reached, turn);
        event->changed.notify_all();
    });
    return hipSuccess;
}
inline hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned) {
    std::lock_guard lock(event->mutex);
    hip_double_of(stream)->add([event, turn = event->recorded] {
        std::unique_lock reached(event->mutex);
        event->changed.wait(reached, [&] { return event->reached >= turn; });
    });
    return hipSuccess;
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
    hip_double_of(stream)->add([=] { std::memcpy(to, from, bytes); });
    return hipSuccess;
}

template <class... P, class... A>
void hipLaunchKernelGGL(void (*kernel)(P...), dim3 grid, dim3 threads, size_t, hipStream_t stream,
                        A... arguments) {
    if (threads.x == 0 || threads.x % unsigned(hip_double::wave()) != 0) {
        hip_double::misused("a work-group is not made of whole waves");
    }
    hip_double_of(stream)->add([=] {
        gridDim = grid, blockDim = threads;
        for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
            hip_double::block = {threads.x, 0, false};
            for (threadIdx.x = 0; threadIdx.x < threads.x; ++threadIdx.x) kernel(P(arguments)...);
            if (hip_double::block.calls % int(threads.x) != 0) {
                hip_double::misused("what is for a whole work-group was not called by all its threads");
            }
        }
    });
}
