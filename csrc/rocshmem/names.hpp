// What the installed rocSHMEM has, determined when this is compiled. Names have changed from 2.x to 3.x and
// keep changing, and some functions came later or exist only on the host or only on the device. Nothing here
// asks for a version.
//
// For each function that may be missing there is a decoy that takes any arguments: overload resolution
// prefers the library's function if it can be called from here. The type of a decoy identifies it, and decoys
// are called only in discarded branches.
#pragma once
#include <hip/hip_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <rocshmem/rocshmem.hpp>
#include <type_traits>

// Stand-ins for types and constants that came with 3.0: those in namespace rocshmem hide them.
struct rocshmem_init_attr_t {};
using rocshmem_uniqueid_t = std::array<uint8_t, 128>;
constexpr unsigned ROCSHMEM_INIT_WITH_UNIQUEID = 0;

namespace rocshmem::unicomm_found {
using Attributes = rocshmem_init_attr_t;
using Uid = rocshmem_uniqueid_t;
constexpr unsigned kByUid = ROCSHMEM_INIT_WITH_UNIQUEID;
}  // namespace rocshmem::unicomm_found

// Outside of unicomm: lookup must find these and the library's functions at the same time.
namespace unicomm_rocshmem_decoys {

struct Absent {
    template <class T>
    __host__ __device__ operator T() const;  // so that discarded branches compile
};

#define UNICOMM_MAYBE(name) __host__ __device__ Absent name(...);
#define UNICOMM_MAYBE_OF_NOTHING(name) /* without arguments a template is what is not preferred */ \
    template <int = 0>                                                                             \
    __host__ __device__ Absent name();
// On the host.
UNICOMM_MAYBE(rocshmem_get_uniqueid)
UNICOMM_MAYBE(rocshmem_set_attr_uniqueid_args)
UNICOMM_MAYBE(rocshmem_init_attr)
UNICOMM_MAYBE(rocshmem_align)
UNICOMM_MAYBE(rocshmem_ptr)
UNICOMM_MAYBE(rocshmem_putmem_on_stream)
UNICOMM_MAYBE(rocshmem_getmem_on_stream)
UNICOMM_MAYBE(rocshmem_putmem_signal_on_stream)
UNICOMM_MAYBE(rocshmem_signal_wait_until_on_stream)
UNICOMM_MAYBE(rocshmem_quiet_on_stream)
UNICOMM_MAYBE(rocshmem_barrier_all_on_stream)
UNICOMM_MAYBE(rocshmem_barrier_on_stream)
// On the device.
UNICOMM_MAYBE_OF_NOTHING(rocshmem_wg_init)
UNICOMM_MAYBE_OF_NOTHING(rocshmem_wg_finalize)
UNICOMM_MAYBE(rocshmem_putmem_wg)
UNICOMM_MAYBE(rocshmem_putmem_nbi_wg)
UNICOMM_MAYBE(rocshmem_getmem_wg)
UNICOMM_MAYBE(rocshmem_getmem_nbi_wg)
UNICOMM_MAYBE(rocshmem_putmem_signal_wg)
UNICOMM_MAYBE(rocshmem_uint64_wait_until)
UNICOMM_MAYBE(rocshmem_uint64_atomic_set)
UNICOMM_MAYBE(rocshmem_uint64_atomic_add)
UNICOMM_MAYBE(rocshmem_uint64_atomic_fetch_add)
UNICOMM_MAYBE(rocshmem_uint64_atomic_compare_swap)
UNICOMM_MAYBE_OF_NOTHING(rocshmem_barrier_all_wg)  // 3.x
UNICOMM_MAYBE_OF_NOTHING(rocshmem_wg_barrier_all)  // 2.x
UNICOMM_MAYBE(rocshmem_barrier_wg)                 // of a team: 3.3
UNICOMM_MAYBE(rocshmem_ctx_barrier_wg)             // 3.0
UNICOMM_MAYBE(rocshmem_ctx_wg_team_sync)           // 2.x: does not wait for puts
#undef UNICOMM_MAYBE
#undef UNICOMM_MAYBE_OF_NOTHING
}  // namespace unicomm_rocshmem_decoys

namespace unicomm::rocshmem_unit {

using namespace ::rocshmem;
using namespace ::unicomm_rocshmem_decoys;
using rocshmem::unicomm_found::Attributes;
using rocshmem::unicomm_found::kByUid;
using rocshmem::unicomm_found::Uid;
using Team = rocshmem_team_t;

// `kHost...` and `kDevice...`: whether a call compiles on that side. The check is within a function of that
// side, because only there the compiler leaves out what belongs to the other side.
#define UNICOMM_FOUND(side, constant, call)                                                              \
    side inline auto constant##_found([[maybe_unused]] void* to, [[maybe_unused]] const void* from,      \
                                      [[maybe_unused]] size_t n, [[maybe_unused]] uint64_t* word,        \
                                      [[maybe_unused]] uint64_t value, [[maybe_unused]] int i,           \
                                      [[maybe_unused]] Team team, [[maybe_unused]] hipStream_t stream) { \
        return std::bool_constant<!std::is_same_v<decltype(call), Absent>>{};                            \
    }                                                                                                    \
    constexpr bool constant =                                                                            \
        decltype(constant##_found(nullptr, nullptr, 0, nullptr, 0, 0, nullptr, nullptr))::value;

// clang-format off
UNICOMM_FOUND(__host__, kHostUid, rocshmem_get_uniqueid(static_cast<Uid*>(to)))
UNICOMM_FOUND(__host__, kHostInitAttr, rocshmem_init_attr(kByUid, static_cast<Attributes*>(to)))
UNICOMM_FOUND(__host__, kHostAlign, rocshmem_align(n, n))
UNICOMM_FOUND(__host__, kHostPtr, rocshmem_ptr(to, i))
UNICOMM_FOUND(__host__, kHostPut, rocshmem_putmem_on_stream(to, from, n, i, stream))
UNICOMM_FOUND(__host__, kHostGet, rocshmem_getmem_on_stream(to, from, n, i, stream))
UNICOMM_FOUND(__host__, kHostPutSignal, rocshmem_putmem_signal_on_stream(to, from, n, word, value, i, i, stream))
UNICOMM_FOUND(__host__, kHostWait, rocshmem_signal_wait_until_on_stream(word, i, value, stream))
UNICOMM_FOUND(__host__, kHostQuiet, rocshmem_quiet_on_stream(stream))
UNICOMM_FOUND(__host__, kHostBarrier, rocshmem_barrier_all_on_stream(stream))
UNICOMM_FOUND(__host__, kHostTeamBarrier, rocshmem_barrier_on_stream(team, stream))

UNICOMM_FOUND(__device__, kDeviceInit, rocshmem_wg_init())
UNICOMM_FOUND(__device__, kDevicePut, rocshmem_putmem_wg(to, from, n, i))
UNICOMM_FOUND(__device__, kDevicePutNbi, rocshmem_putmem_nbi_wg(to, from, n, i))
UNICOMM_FOUND(__device__, kDeviceGet, rocshmem_getmem_wg(to, from, n, i))
UNICOMM_FOUND(__device__, kDeviceGetNbi, rocshmem_getmem_nbi_wg(to, from, n, i))
UNICOMM_FOUND(__device__, kDevicePutSignal, rocshmem_putmem_signal_wg(to, from, n, word, value, i, i))
UNICOMM_FOUND(__device__, kDeviceWait, rocshmem_uint64_wait_until(word, i, value))
UNICOMM_FOUND(__device__, kDeviceSet, rocshmem_uint64_atomic_set(word, value, i))
UNICOMM_FOUND(__device__, kDeviceAdd, rocshmem_uint64_atomic_add(word, value, i))
UNICOMM_FOUND(__device__, kDeviceFetchAdd, rocshmem_uint64_atomic_fetch_add(word, value, i))
UNICOMM_FOUND(__device__, kDeviceCompareSwap, rocshmem_uint64_atomic_compare_swap(word, value, value, i))
UNICOMM_FOUND(__device__, kDeviceBarrierAllWg, rocshmem_barrier_all_wg())
UNICOMM_FOUND(__device__, kDeviceWgBarrierAll, rocshmem_wg_barrier_all())
UNICOMM_FOUND(__device__, kDeviceBarrierWg, rocshmem_barrier_wg(team))
UNICOMM_FOUND(__device__, kDeviceCtxBarrierWg, rocshmem_ctx_barrier_wg(ROCSHMEM_CTX_DEFAULT, team))
UNICOMM_FOUND(__device__, kDeviceTeamSync, rocshmem_ctx_wg_team_sync(ROCSHMEM_CTX_DEFAULT, team))
// clang-format on
#undef UNICOMM_FOUND

constexpr bool kByUniqueId = kHostUid && kHostInitAttr;  // otherwise MPI tells the PEs their numbers
constexpr bool kBarrier = kHostBarrier || kDeviceBarrierAllWg || kDeviceWgBarrierAll;
constexpr bool kTeamBarrier = kHostTeamBarrier || kDeviceBarrierWg || kDeviceCtxBarrierWg || kDeviceTeamSync;

}  // namespace unicomm::rocshmem_unit
