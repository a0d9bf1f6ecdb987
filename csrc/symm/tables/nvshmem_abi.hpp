// The part of NVSHMEM's C interface that the table needs, declared here so that building needs none of
// NVIDIA's headers. Taken from the headers of 3.4.5 and 3.8.0; tests/backends/shmem/test_real_nvshmem.py
// compares it with installed ones.
#pragma once
#include <cstddef>
#include <cstdint>

namespace unicomm::symm::nvshmem {

// Structures contain their version and size. All supported libraries accept the first version of each; 3.8
// has a default for what it added in the second version (the number of the device).
constexpr int32_t versioned(int version, size_t bytes) { return int32_t(version << 16) + int32_t(bytes); }

struct Id {  // nvshmemx_uniqueid_v1
    int32_t version;
    char internal[124];
};
struct IdArgs {  // nvshmemx_uniqueid_args_v1
    int32_t version;
    Id* id;
    int32_t rank, world;
};
struct InitArgs {  // nvshmemx_init_args_v1
    int32_t version;
    IdArgs id;
    char content[96];
};
struct InitAttr {  // nvshmemx_init_attr_v1
    int32_t version;
    void* mpi_comm;
    InitArgs args;
};
static_assert(sizeof(Id) == 128 && sizeof(IdArgs) == 24 && sizeof(InitArgs) == 128 &&
              sizeof(InitAttr) == 144);

constexpr int kOldest = 30400, kNewest = 39999;  // as 3.4.5 is 30405
constexpr unsigned kInitWithUniqueId = 1 << 3;
constexpr int32_t kTeamInvalid = -1, kTeamWorld = 0;

enum SignalNumber : int { kSignalSet = 9, kSignalAdd = 10 };
enum CompareNumber : int { kCmpEq, kCmpNe, kCmpGt, kCmpLe, kCmpLt, kCmpGe };
enum Status : int { kNotInitialized, kBootstrapped, kInitialized, kLimitedMpg, kFullMpg };

}  // namespace unicomm::symm::nvshmem

// Name and type of each function. Streams are CUDA streams.
#define UNICOMM_NVSHMEM_FUNCTIONS(X)                                                        \
    X(nvshmemx_vendor_get_version_info, void(int*, int*, int*))                             \
    X(nvshmemx_init_status, int())                                                          \
    X(nvshmemx_get_uniqueid, int(Id*))                                                      \
    X(nvshmemx_set_attr_uniqueid_args, int(const int, const int, const Id*, InitAttr*))     \
    X(nvshmemx_hostlib_init_attr, int(unsigned, InitAttr*))                                 \
    X(nvshmemx_hostlib_finalize, void())                                                    \
    X(nvshmem_my_pe, int())                                                                 \
    X(nvshmem_n_pes, int())                                                                 \
    X(nvshmem_align, void*(size_t, size_t))                                                 \
    X(nvshmem_free, void(void*))                                                            \
    X(nvshmem_ptr, void*(const void*, int))                                                 \
    X(nvshmem_barrier_all, void())                                                          \
    X(nvshmem_uint64_p, void(uint64_t*, const uint64_t, int))                               \
    X(nvshmem_uint64_g, uint64_t(const uint64_t*, int))                                     \
    X(nvshmemx_putmem_on_stream, void(void*, const void*, size_t, int, Stream))             \
    X(nvshmemx_getmem_on_stream, void(void*, const void*, size_t, int, Stream))             \
    X(nvshmemx_putmem_nbi_on_stream, void(void*, const void*, size_t, int, Stream))         \
    X(nvshmemx_getmem_nbi_on_stream, void(void*, const void*, size_t, int, Stream))         \
    X(nvshmemx_putmem_signal_on_stream,                                                     \
      void(void*, const void*, size_t, uint64_t*, uint64_t, int, int, Stream))              \
    X(nvshmemx_signal_op_on_stream, void(uint64_t*, uint64_t, int, int, Stream))            \
    X(nvshmemx_signal_wait_until_on_stream, void(uint64_t*, int, uint64_t, Stream))         \
    X(nvshmemx_quiet_on_stream, void(Stream))                                               \
    X(nvshmemx_barrier_all_on_stream, void(Stream))                                         \
    X(nvshmemx_barrier_on_stream, int(int32_t, Stream))                                     \
    X(nvshmem_team_split_strided, int(int32_t, int, int, int, const void*, long, int32_t*)) \
    X(nvshmem_team_destroy, void(int32_t))
// clang-format on
