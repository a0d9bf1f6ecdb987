// Compiled against NVSHMEM's own headers: what csrc/symm/tables/nvshmem_abi.hpp says of it must be so.
#include <cstddef>
#include <type_traits>

#ifdef WITH_CUDA
#include "nvshmem_host.h"
#else
#include "device_host/nvshmem_types.h"
#include "device_host_transport/nvshmem_constants.h"
#endif
#include "device_host_transport/nvshmem_common_transport.h"
#include "symm/tables/nvshmem_abi.hpp"

namespace ours = unicomm::symm::nvshmem;

#define SAME_PLACE(type, mine, theirs, field) \
    static_assert(offsetof(ours::type, mine) == offsetof(theirs, field))

static_assert(sizeof(ours::Id) == sizeof(nvshmemx_uniqueid_v1));
SAME_PLACE(Id, internal, nvshmemx_uniqueid_v1, internal);
static_assert(sizeof(ours::IdArgs) == sizeof(nvshmemx_uniqueid_args_v1));
SAME_PLACE(IdArgs, id, nvshmemx_uniqueid_args_v1, id);
SAME_PLACE(IdArgs, rank, nvshmemx_uniqueid_args_v1, myrank);
SAME_PLACE(IdArgs, world, nvshmemx_uniqueid_args_v1, nranks);
static_assert(sizeof(ours::InitArgs) == sizeof(nvshmemx_init_args_v1));
SAME_PLACE(InitArgs, id, nvshmemx_init_args_v1, uid_args);
SAME_PLACE(InitArgs, content, nvshmemx_init_args_v1, content);
static_assert(sizeof(ours::InitAttr) == sizeof(nvshmemx_init_attr_v1));
SAME_PLACE(InitAttr, mpi_comm, nvshmemx_init_attr_v1, mpi_comm);
SAME_PLACE(InitAttr, args, nvshmemx_init_attr_v1, args);

static_assert(ours::kSignalSet == NVSHMEM_SIGNAL_SET && ours::kSignalAdd == NVSHMEM_SIGNAL_ADD);
static_assert(ours::kCmpEq == NVSHMEM_CMP_EQ && ours::kCmpNe == NVSHMEM_CMP_NE);
static_assert(ours::kCmpGt == NVSHMEM_CMP_GT && ours::kCmpLe == NVSHMEM_CMP_LE);
static_assert(ours::kCmpLt == NVSHMEM_CMP_LT && ours::kCmpGe == NVSHMEM_CMP_GE);
static_assert(ours::kBootstrapped == NVSHMEM_STATUS_IS_BOOTSTRAPPED);
static_assert(ours::kInitialized == NVSHMEM_STATUS_IS_INITIALIZED);
static_assert(ours::kLimitedMpg == NVSHMEM_STATUS_LIMITED_MPG && ours::kFullMpg == NVSHMEM_STATUS_FULL_MPG);
static_assert(std::is_same_v<nvshmem_team_t, int32_t>);
static_assert(NVSHMEM_VENDOR_VERSION >= ours::kOldest && NVSHMEM_VENDOR_VERSION <= ours::kNewest);

#ifdef WITH_CUDA
// The same types, but for what is ours: the structures (compared above), and streams as pointers.
using Id = nvshmemx_uniqueid_t;
using InitAttr = nvshmemx_init_attr_t;
using Stream = cudaStream_t;
static_assert(sizeof(Stream) == sizeof(void*));
static_assert(ours::kInitWithUniqueId == NVSHMEMX_INIT_WITH_UNIQUEID);
static_assert(ours::kTeamInvalid == NVSHMEM_TEAM_INVALID && ours::kTeamWorld == NVSHMEM_TEAM_WORLD);
template <class Theirs, class Ours>
struct Takes : std::false_type {};
template <class R, class... Theirs, class... Ours>
struct Takes<R(Theirs...), R(Ours...)>
    : std::bool_constant<(... && (std::is_same_v<Theirs, Ours> ||
                                  (std::is_pointer_v<Theirs> && std::is_same_v<Ours, const void*>)))> {};
#define SAME_FUNCTION(name, ...) static_assert(Takes<decltype(name), __VA_ARGS__>::value, #name);
UNICOMM_NVSHMEM_FUNCTIONS(SAME_FUNCTION)
#endif
