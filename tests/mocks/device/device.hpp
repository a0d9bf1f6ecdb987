// What unicomm/symm/kernels needs of a device, by a host compiler: a mock for tests where there is no GPU.
//
// The blocks of a kernel run one after the other, which is legal as only kernels of one block wait. The
// threads of a block are fibers of one thread, which take turns where they synchronise or pause.
#pragma once
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__ __attribute__((visibility("default")))
#define __shared__ static thread_local

struct Index {
    unsigned x;
};
inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;

namespace fibers {

constexpr size_t kStack = 64 << 10;

struct Block {
    ucontext_t scheduler;
    std::vector<ucontext_t> threads;
    std::vector<char> stacks, over;
    unsigned running = 0, living = 0, arrived = 0, round = 0;
    const std::function<void()>* body = nullptr;
};
inline thread_local Block* block = nullptr;

inline void yield() {
    Block* own = block;
    unsigned me = own->running;
    swapcontext(&own->threads[me], &own->scheduler);
}

inline void begin() {
    (*block->body)();
    block->over[block->running] = 1;
    --block->living;
}

// Who has returned is not waited for.
inline void synchronize() {
    Block* own = block;
    unsigned round = own->round;
    ++own->arrived;
    while (own->round == round) {
        if (own->arrived >= own->living) {
            own->arrived = 0;
            ++own->round;
        } else {
            yield();
        }
    }
}

inline void run(unsigned count, const std::function<void()>& body) {
    Block own;
    own.threads.resize(count), own.stacks.resize(count * kStack), own.over.resize(count);
    own.living = count, own.body = &body;
    block = &own;
    for (unsigned i = 0; i < count; ++i) {
        getcontext(&own.threads[i]);
        own.threads[i].uc_stack.ss_sp = own.stacks.data() + i * kStack;
        own.threads[i].uc_stack.ss_size = kStack;
        own.threads[i].uc_link = &own.scheduler;
        makecontext(&own.threads[i], begin, 0);
    }
    while (own.living) {
        for (unsigned i = 0; i < count; ++i) {
            if (own.over[i]) continue;
            own.running = i;
            threadIdx.x = i;
            swapcontext(&own.scheduler, &own.threads[i]);
        }
    }
    block = nullptr;
}

}  // namespace fibers

inline void __syncthreads() { fibers::synchronize(); }
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }

// Of one block, whose threads take turns.
inline Word atomicAdd(Word* at, Word value) {
    Word before = *at;
    *at += value;
    return before;
}
inline unsigned atomicMin(unsigned* at, unsigned value) {
    unsigned before = *at;
    if (value < before) *at = value;
    return before;
}

inline Word load_acquire(const Word* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
inline void store_release(Word* at, Word value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
inline Word fetch_add(Word* at, Word value) { return __atomic_fetch_add(at, value, __ATOMIC_ACQ_REL); }
inline Word compare_swap(Word* at, Word expected, Word value) {
    __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return expected;
}
inline Word now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return Word(now.tv_sec) * 1000000000 + Word(now.tv_nsec);
}
inline void pause_a_little() {
    usleep(20);  // somebody else needs the core
    unsigned me = threadIdx.x;
    fibers::yield();
    threadIdx.x = me;
}

inline float half_to_float(unsigned short bits) {
    _Float16 value;
    std::memcpy(&value, &bits, sizeof value);
    return float(value);
}
inline unsigned short float_to_half(float value) {
    auto half = _Float16(value);
    unsigned short bits;
    std::memcpy(&bits, &half, sizeof bits);
    return bits;
}
