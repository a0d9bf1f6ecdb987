// A mock of rocSHMEM's interface, written for these tests by its documentation: it proves what
// csrc/rocshmem makes of such a library, and nothing about AMD's. ROCSHMEM_MOCK_VERSION, by
// rocshmem_config.h: which release's set of names this has; 20001 plays 2.0.1, and so on. Also compiles with
// the real hipcc, for which sides there are two.
#pragma once
#include <hip/hip_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "rocshmem_config.h"
#if ROCSHMEM_MOCK_VERSION < 30100
#include <mpi.h>
#endif

namespace rocshmem {

#if ROCSHMEM_MOCK_VERSION < 30000
constexpr char VERSION[] = "2.0.1";
#else
constexpr char VERSION[] = ROCSHMEM_VERSION;
#endif

enum ROCSHMEM_SIGNAL_OPS { ROCSHMEM_SIGNAL_SET, ROCSHMEM_SIGNAL_ADD };
enum rocshmem_cmps {
    ROCSHMEM_CMP_EQ,
    ROCSHMEM_CMP_NE,
    ROCSHMEM_CMP_GT,
    ROCSHMEM_CMP_GE,
    ROCSHMEM_CMP_LT,
    ROCSHMEM_CMP_LE
};
struct rocshmem_team_config_t {
    int num_contexts;
};
struct rocshmem_ctx_t {
    void *ctx_opaque, *team_opaque;
};
using rocshmem_team_t = uint64_t*;
const rocshmem_team_t ROCSHMEM_TEAM_INVALID = nullptr;
#if ROCSHMEM_MOCK_VERSION < 30300
extern rocshmem_team_t ROCSHMEM_TEAM_WORLD;
#else
namespace host {
extern rocshmem_team_t ROCSHMEM_TEAM_WORLD;
}
#if defined(__HIP__)
namespace device {
extern __constant__ rocshmem_team_t ROCSHMEM_TEAM_WORLD;
}
#endif
#if __HIP_DEVICE_COMPILE__
using device::ROCSHMEM_TEAM_WORLD;
#else
using host::ROCSHMEM_TEAM_WORLD;
#endif
#endif
#if defined(__HIP__)
extern __constant__ rocshmem_ctx_t ROCSHMEM_CTX_DEFAULT;
#else
inline rocshmem_ctx_t ROCSHMEM_CTX_DEFAULT{};
#endif

// The host's.
#if ROCSHMEM_MOCK_VERSION < 30100
__host__ void rocshmem_init(MPI_Comm comm = MPI_COMM_WORLD);
#else
__host__ void rocshmem_init();
#endif
__host__ void rocshmem_finalize();
__host__ int rocshmem_my_pe();
__host__ int rocshmem_n_pes();
__host__ void* rocshmem_malloc(size_t size);
__host__ void rocshmem_free(void* ptr);
__host__ void rocshmem_barrier_all();
__host__ void rocshmem_quiet();
__host__ void rocshmem_fence();
__host__ int rocshmem_team_split_strided(rocshmem_team_t parent, int start, int stride, int size,
                                         const rocshmem_team_config_t* config, long config_mask,
                                         rocshmem_team_t* team);
#if ROCSHMEM_MOCK_VERSION >= 30000
using rocshmem_uniqueid_t = std::array<uint8_t, 128>;
struct rocshmem_init_attr_t {
    int32_t rank, nranks;
    rocshmem_uniqueid_t uid;
    void* mpi_comm;
};
constexpr unsigned ROCSHMEM_INIT_WITH_MPI_COMM = 0, ROCSHMEM_INIT_WITH_UNIQUEID = 1;
__host__ int rocshmem_get_uniqueid(rocshmem_uniqueid_t* uid);
__host__ int rocshmem_set_attr_uniqueid_args(int rank, int nranks, rocshmem_uniqueid_t* uid,
                                             rocshmem_init_attr_t* attr);
__host__ int rocshmem_init_attr(unsigned flags, rocshmem_init_attr_t* attr);
#endif
#if ROCSHMEM_MOCK_VERSION >= 30100
__host__ void* rocshmem_ptr(const void* dest, int pe);
__device__ void* rocshmem_ptr(const void* dest, int pe);
#elif ROCSHMEM_MOCK_VERSION >= 30000
__host__ void* rocshmem_ptr(void* dest, int pe);
#elif defined(__HIP__)  // the other compiler does not know sides
__device__ void* rocshmem_ptr(const void* dest, int pe);
#endif
#if ROCSHMEM_MOCK_VERSION >= 30300
__host__ void rocshmem_quiet_on_stream(hipStream_t stream);
__host__ void rocshmem_barrier_all_on_stream(hipStream_t stream);
__host__ void rocshmem_putmem_on_stream(void* dest, const void* source, size_t bytes, int pe,
                                        hipStream_t stream);
__host__ void rocshmem_getmem_on_stream(void* dest, const void* source, size_t bytes, int pe,
                                        hipStream_t stream);
__host__ void rocshmem_putmem_signal_on_stream(void* dest, const void* source, size_t bytes,
                                               uint64_t* sig_addr, uint64_t signal, int sig_op, int pe,
                                               hipStream_t stream);
__host__ void rocshmem_signal_wait_until_on_stream(uint64_t* sig_addr, int cmp, uint64_t value,
                                                   hipStream_t stream);
#endif
#if ROCSHMEM_MOCK_VERSION >= 30400
__host__ void* rocshmem_align(size_t alignment, size_t size);
#endif
#if ROCSHMEM_MOCK_VERSION >= 30500
__host__ void rocshmem_barrier_on_stream(rocshmem_team_t team, hipStream_t stream);
#endif

// The device's.
__device__ void rocshmem_wg_init();
__device__ void rocshmem_wg_finalize();
#if defined(__HIP__)  // the others are those of the host
__device__ void rocshmem_quiet();
__device__ void rocshmem_fence();
#endif
__device__ void rocshmem_putmem_wg(void* dest, const void* source, size_t bytes, int pe);
__device__ void rocshmem_getmem_wg(void* dest, const void* source, size_t bytes, int pe);
__device__ void rocshmem_putmem_nbi_wg(void* dest, const void* source, size_t bytes, int pe);
__device__ void rocshmem_getmem_nbi_wg(void* dest, const void* source, size_t bytes, int pe);
__device__ void rocshmem_putmem_signal_wg(void* dest, const void* source, size_t bytes, uint64_t* sig_addr,
                                          uint64_t signal, int sig_op, int pe);
__device__ void rocshmem_uint64_wait_until(uint64_t* ivars, int cmp, uint64_t value);
__device__ void rocshmem_uint64_atomic_set(uint64_t* dest, uint64_t value, int pe);
__device__ void rocshmem_uint64_atomic_add(uint64_t* dest, uint64_t value, int pe);
__device__ uint64_t rocshmem_uint64_atomic_fetch_add(uint64_t* dest, uint64_t value, int pe);
__device__ uint64_t rocshmem_uint64_atomic_compare_swap(uint64_t* dest, uint64_t cond, uint64_t value,
                                                        int pe);
#if ROCSHMEM_MOCK_VERSION >= 30000
__device__ void rocshmem_barrier_all_wg();
__device__ void rocshmem_ctx_barrier_wg(rocshmem_ctx_t ctx, rocshmem_team_t team);
#else
__device__ void rocshmem_wg_barrier_all();
__device__ void rocshmem_ctx_wg_team_sync(rocshmem_ctx_t ctx, rocshmem_team_t team);
#endif
#if ROCSHMEM_MOCK_VERSION >= 30300
__device__ void rocshmem_barrier_wg(rocshmem_team_t team);
#endif

}  // namespace rocshmem
