// Kernels for functions that the library has only on the device. Each kernel is one work-group, in the order
// of its stream, like the library's own `_on_stream` functions. All threads of the group call the functions
// whose name ends in `_wg`.
#pragma once
#include "rocshmem/names.hpp"

namespace unicomm::rocshmem_unit {

__device__ inline void enter() {
    if constexpr (kDeviceInit) rocshmem_wg_init();  // 2.x needs it; 3.x still has it
}

__device__ inline void leave_group() {
    if constexpr (kDeviceInit) rocshmem_wg_finalize();
}

__device__ inline bool leader() { return threadIdx.x == 0; }

__global__ void put_kernel(void* to, const void* from, size_t bytes, int pe) {
    enter();
    if constexpr (kDevicePut) rocshmem_putmem_wg(to, from, bytes, pe);
    leave_group();
}

__global__ void put_nbi_kernel(void* to, const void* from, size_t bytes, int pe) {
    enter();
    if constexpr (kDevicePutNbi) rocshmem_putmem_nbi_wg(to, from, bytes, pe);
    leave_group();
}

__global__ void get_kernel(void* to, const void* from, size_t bytes, int pe) {
    enter();
    if constexpr (kDeviceGet) rocshmem_getmem_wg(to, from, bytes, pe);
    leave_group();
}

__global__ void get_nbi_kernel(void* to, const void* from, size_t bytes, int pe) {
    enter();
    if constexpr (kDeviceGetNbi) rocshmem_getmem_nbi_wg(to, from, bytes, pe);
    leave_group();
}

__global__ void put_signal_kernel(void* to, const void* from, size_t bytes, uint64_t* signal, uint64_t value,
                                  int op, int pe) {
    enter();
    if constexpr (kDevicePutSignal) rocshmem_putmem_signal_wg(to, from, bytes, signal, value, op, pe);
    leave_group();
}

// A signal without data, after earlier puts.
__global__ void signal_kernel(uint64_t* signal, uint64_t value, bool add, int pe) {
    enter();
    if (leader()) {
        rocshmem_fence();
        if constexpr (kDeviceSet && kDeviceAdd) {
            if (add) {
                rocshmem_uint64_atomic_add(signal, value, pe);
            } else {
                rocshmem_uint64_atomic_set(signal, value, pe);
            }
        }
    }
    leave_group();
}

__global__ void wait_kernel(uint64_t* signal, int compare, uint64_t value) {
    enter();
    if constexpr (kDeviceWait) {
        if (leader()) rocshmem_uint64_wait_until(signal, compare, value);
    }
    leave_group();
}

__global__ void fence_kernel() {
    enter();
    if (leader()) rocshmem_fence();
    leave_group();
}

__global__ void quiet_kernel() {
    enter();
    if (leader()) rocshmem_quiet();
    leave_group();
}

__global__ void barrier_kernel() {
    enter();
    if constexpr (kDeviceBarrierAllWg) {
        rocshmem_barrier_all_wg();
    } else if constexpr (kDeviceWgBarrierAll) {
        rocshmem_wg_barrier_all();
    }
    leave_group();
}

__global__ void team_barrier_kernel(Team team) {
    enter();
    if constexpr (kDeviceBarrierWg) {
        rocshmem_barrier_wg(team);
    } else if constexpr (kDeviceCtxBarrierWg) {
        rocshmem_ctx_barrier_wg(ROCSHMEM_CTX_DEFAULT, team);
    } else if constexpr (kDeviceTeamSync) {
        if (leader()) rocshmem_quiet();
        __syncthreads();
        rocshmem_ctx_wg_team_sync(ROCSHMEM_CTX_DEFAULT, team);
    }
    leave_group();
}

__global__ void fetch_add_kernel(uint64_t* target, uint64_t value, int pe, uint64_t* before) {
    enter();
    if constexpr (kDeviceFetchAdd) {
        if (leader()) *before = rocshmem_uint64_atomic_fetch_add(target, value, pe);
    }
    leave_group();
}

__global__ void compare_swap_kernel(uint64_t* target, uint64_t expected, uint64_t value, int pe,
                                    uint64_t* before) {
    enter();
    if constexpr (kDeviceCompareSwap) {
        if (leader()) *before = rocshmem_uint64_atomic_compare_swap(target, expected, value, pe);
    }
    leave_group();
}

}  // namespace unicomm::rocshmem_unit
