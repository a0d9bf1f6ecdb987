// The functions of the table that act in the order of a stream.
#pragma once
#include "rocshmem/world.hpp"

namespace unicomm::rocshmem_unit {
namespace {

using namespace symm;

// Finds the number of the PE in the world, if the whole range is allocated here.
int check(Part& part, const void* address, uint64_t bytes, int pe, int& target, Error* error) {
    if (part.world->broken) return report(kGivenUp, error);
    auto& blocks = part.world->blocks;
    auto after = blocks.upper_bound(const_cast<void*>(address));
    bool inside = false;
    if (after != blocks.begin()) {
        auto& [begin, block] = *std::prev(after);
        auto at = uint64_t(static_cast<const char*>(address) - static_cast<const char*>(begin));
        inside = at <= block.bytes && bytes <= block.bytes - at;
    }
    if (!inside || pe < 0 || pe >= part.size())
        return report("outside of the symmetric heap, or no such PE", error);
    target = part.pes[size_t(pe)];
    return 0;
}

int barrier(Domain domain, uint64_t, Stream stream, Error* error) {
    Part& part = part_of(domain);
    if (part.world->broken) return report(kGivenUp, error);
    return barrier_on(part, of(stream), error);
}

[[maybe_unused]] int ptr(Domain domain, const void* address, uint64_t bytes, int pe, void** out,
                         Error* error) {
    int target = 0;
    if (int code = check(part_of(domain), address, bytes, pe, target, error)) return code;
    if constexpr (kHostPtr)
        *out = rocshmem_ptr(const_cast<void*>(address), target);  // 3.0 takes no const pointer
    if (*out == nullptr)
        return report("the memory of PE " + std::to_string(pe) + " cannot be addressed", error);
    return 0;
}

int put(Domain domain, void* to, const void* from, uint64_t bytes, int pe, Stream stream, Error* error) {
    Part& part = part_of(domain);
    int target = 0;
    if (int code = check(part, to, bytes, pe, target, error)) return code;
    return bytes == 0 ? 0 : put_on(*part.world, to, from, bytes, target, of(stream), error);
}

int get(Domain domain, void* to, const void* from, uint64_t bytes, int pe, Stream stream, Error* error) {
    Part& part = part_of(domain);
    int target = 0;
    if (int code = check(part, from, bytes, pe, target, error)) return code;
    if (bytes == 0) return 0;
    if constexpr (kHostGet) {
        rocshmem_getmem_on_stream(to, from, bytes, target, of(stream));
    } else {
        hipLaunchKernelGGL(get_kernel, dim3(1), group(*part.world, bytes), 0, of(stream), to, from,
                           size_t(bytes), target);
    }
    return launched("get", error);
}

int put_nbi(Domain domain, void* to, const void* from, uint64_t bytes, int pe, Stream stream, Error* error) {
    if constexpr (!kDevicePutNbi) return put(domain, to, from, bytes, pe, stream, error);
    Part& part = part_of(domain);
    int target = 0;
    if (int code = check(part, to, bytes, pe, target, error)) return code;
    if (bytes == 0) return 0;
    hipLaunchKernelGGL(put_nbi_kernel, dim3(1), group(*part.world, bytes), 0, of(stream), to, from,
                       size_t(bytes), target);
    return launched("put_nbi", error);
}

int get_nbi(Domain domain, void* to, const void* from, uint64_t bytes, int pe, Stream stream, Error* error) {
    if constexpr (!kDeviceGetNbi) return get(domain, to, from, bytes, pe, stream, error);
    Part& part = part_of(domain);
    int target = 0;
    if (int code = check(part, from, bytes, pe, target, error)) return code;
    if (bytes == 0) return 0;
    hipLaunchKernelGGL(get_nbi_kernel, dim3(1), group(*part.world, bytes), 0, of(stream), to, from,
                       size_t(bytes), target);
    return launched("get_nbi", error);
}

int fence(Domain domain, Stream stream, Error* error) {
    hipLaunchKernelGGL(fence_kernel, dim3(1), group(*part_of(domain).world), 0, of(stream));
    return launched("fence", error);
}

int quiet(Domain domain, Stream stream, Error* error) {
    if constexpr (kHostQuiet) {
        rocshmem_quiet_on_stream(of(stream));
    } else {
        hipLaunchKernelGGL(quiet_kernel, dim3(1), group(*part_of(domain).world), 0, of(stream));
    }
    return launched("quiet", error);
}

[[maybe_unused]] int put_signal(Domain domain, void* to, const void* from, uint64_t bytes, uint64_t* signal,
                                uint64_t value, SignalOp op, int pe, Stream stream, Error* error) {
    Part& part = part_of(domain);
    int target = 0;
    int code = check(part, signal, sizeof *signal, pe, target, error);
    if (code == 0 && bytes != 0) code = check(part, to, bytes, pe, target, error);
    if (code != 0) return code;
    int library_op = op == SignalOp::kAdd ? int(ROCSHMEM_SIGNAL_ADD) : int(ROCSHMEM_SIGNAL_SET);
    if constexpr (kDeviceSet && kDeviceAdd) {
        if (bytes == 0) {  // a library may send no signal if nothing is put
            hipLaunchKernelGGL(signal_kernel, dim3(1), group(*part.world), 0, of(stream), signal, value,
                               op == SignalOp::kAdd, target);
            return launched("signal", error);
        }
    }
    if constexpr (kHostPutSignal) {
        rocshmem_putmem_signal_on_stream(to, from, bytes, signal, value, library_op, target, of(stream));
    } else {
        hipLaunchKernelGGL(put_signal_kernel, dim3(1), group(*part.world, bytes), 0, of(stream), to, from,
                           size_t(bytes), signal, value, library_op, target);
    }
    return launched("put_signal", error);
}

int library_compare(Compare compare) {
    switch (compare) {
        case Compare::kEq:
            return ROCSHMEM_CMP_EQ;
        case Compare::kNe:
            return ROCSHMEM_CMP_NE;
        case Compare::kGt:
            return ROCSHMEM_CMP_GT;
        case Compare::kGe:
            return ROCSHMEM_CMP_GE;
        case Compare::kLt:
            return ROCSHMEM_CMP_LT;
        case Compare::kLe:
            return ROCSHMEM_CMP_LE;
    }
    return -1;
}

[[maybe_unused]] int wait_signal(Domain domain, const uint64_t* signal, Compare compare, uint64_t value, int,
                                 uint64_t, Stream stream, Error* error) {
    Part& part = part_of(domain);
    int own = 0, how = library_compare(compare);
    if (int code = check(part, signal, sizeof *signal, part.rank, own, error)) return code;
    if (how < 0) return report("there is no such comparison", error);
    auto* word = const_cast<uint64_t*>(signal);
    if constexpr (kHostWait) {
        rocshmem_signal_wait_until_on_stream(word, how, value, of(stream));
    } else {
        hipLaunchKernelGGL(wait_kernel, dim3(1), group(*part.world), 0, of(stream), word, how, value);
    }
    return launched("wait_signal", error);
}

int fetch(Part& part, uint64_t* before, hipStream_t stream, const char* what, Error* error) {
    if (int code = launched(what, error)) return code;
    hipError_t result = hipSuccess;  // waits for everything in the stream
    FaultCode fault = finish(part, stream, UINT64_MAX, result);
    if (fault != FaultCode::kNone) return report(fault, "", error);
    if (int code = checked(result, what, error)) return code;
    *before = *part.world->result;
    return 0;
}

[[maybe_unused]] int fetch_add(Domain domain, uint64_t* word, uint64_t value, int pe, uint64_t* before,
                               Stream stream, Error* error) {
    Part& part = part_of(domain);
    int target = 0;
    if (int code = check(part, word, sizeof *word, pe, target, error)) return code;
    hipLaunchKernelGGL(fetch_add_kernel, dim3(1), group(*part.world), 0, of(stream), word, value, target,
                       part.world->result);
    return fetch(part, before, of(stream), "fetch_add", error);
}

[[maybe_unused]] int compare_swap(Domain domain, uint64_t* word, uint64_t expected, uint64_t value, int pe,
                                  uint64_t* before, Stream stream, Error* error) {
    Part& part = part_of(domain);
    int target = 0;
    if (int code = check(part, word, sizeof *word, pe, target, error)) return code;
    hipLaunchKernelGGL(compare_swap_kernel, dim3(1), group(*part.world), 0, of(stream), word, expected, value,
                       target, part.world->result);
    return fetch(part, before, of(stream), "compare_swap", error);
}

}  // namespace
}  // namespace unicomm::rocshmem_unit
