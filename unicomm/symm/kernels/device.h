// What CUDA and HIP spell differently: words that all devices and the host see, clocks, half precision, and
// float arithmetic. NVRTC and hipRTC come without the headers for that. Tests define SYMM_HOST, the name of a
// header for a host compiler.
#pragma once

typedef long long Int;
typedef unsigned long long Word;

#if defined(SYMM_HOST)
#include SYMM_HOST
#elif defined(__HIP_PLATFORM_AMD__) || defined(__HIP__) || defined(__HIPCC__)
#define SYMM_AMD 1
#if !defined(__HIPCC_RTC__)
#include <hip/hip_runtime.h>
#endif
#endif

#if defined(SYMM_AMD)

__device__ inline Word load_acquire(const Word* at) {
    return __hip_atomic_load(at, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ inline void store_release(Word* at, Word value) {
    __hip_atomic_store(at, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ inline Word fetch_add(Word* at, Word value) {
    return __hip_atomic_fetch_add(at, value, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ inline Word compare_swap(Word* at, Word expected, Word value) {
    __hip_atomic_compare_exchange_strong(at, &expected, value, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE,
                                         __HIP_MEMORY_SCOPE_SYSTEM);
    return expected;
}
// The clock has 100 MHz on all AMD devices so far.
__device__ inline Word now_ns() { return Word(wall_clock64()) * 10; }
__device__ inline void pause_a_little() { __builtin_amdgcn_s_sleep(2); }

__device__ inline float half_to_float(unsigned short bits) {
    return float(__builtin_bit_cast(_Float16, bits));
}
__device__ inline unsigned short float_to_half(float value) {
    return __builtin_bit_cast(unsigned short, _Float16(value));
}

#elif !defined(SYMM_HOST)

__device__ inline Word load_acquire(const Word* at) {
    Word value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
__device__ inline void store_release(Word* at, Word value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ inline Word fetch_add(Word* at, Word value) {
    Word before;
    asm volatile("atom.acq_rel.sys.global.add.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(at), "l"(value)
                 : "memory");
    return before;
}
__device__ inline Word compare_swap(Word* at, Word expected, Word value) {
    Word before;
    asm volatile("atom.acq_rel.sys.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(before)
                 : "l"(at), "l"(expected), "l"(value)
                 : "memory");
    return before;
}
__device__ inline Word now_ns() {
    Word now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
__device__ inline void pause_a_little() { __nanosleep(100); }

__device__ inline float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ inline unsigned short float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#endif

// Float arithmetic. cupy makes NVRTC flush subnormal floats to zero in additions, products and comparisons of
// the language; PTX instructions keep them, like the CPU.
#if defined(SYMM_AMD) || defined(SYMM_HOST)
__device__ inline float float_sum(float a, float b) { return a + b; }
__device__ inline float float_product(float a, float b) { return a * b; }
__device__ inline bool float_less(float a, float b) { return a < b; }
#else
__device__ inline float float_sum(float a, float b) {
    float result;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ inline float float_product(float a, float b) {
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ inline bool float_less(float a, float b) {
    unsigned result;
    asm("set.lt.u32.f32 %0, %1, %2;" : "=r"(result) : "f"(a), "f"(b));
    return result != 0;
}
#endif
