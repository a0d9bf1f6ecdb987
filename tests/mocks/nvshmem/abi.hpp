// NVSHMEM's interface as this mock has it: declared anew from the documents, so that a mistake in the
// package's own declarations shows.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
typedef void* cudaStream_t;
typedef int32_t nvshmem_team_t;

typedef struct {
    int version;
    char internal[124];
} nvshmemx_uniqueid_v1;

typedef struct {
    int version;
    nvshmemx_uniqueid_v1* id;
    int myrank;
    int nranks;
} nvshmemx_uniqueid_args_v1;

typedef struct {
    int version;
    nvshmemx_uniqueid_args_v1 uid_args;
    int cuda_device_id;  // the first version has no name for these bytes
    char content[92];
} nvshmemx_init_args_v2;

typedef struct {
    int version;
    void* mpi_comm;
    nvshmemx_init_args_v2 args;
} nvshmemx_init_attr_v2;
}

enum { NVSHMEM_SIGNAL_SET = 9, NVSHMEM_SIGNAL_ADD = 10 };
enum {
    NVSHMEM_CMP_EQ = 0,
    NVSHMEM_CMP_NE = 1,
    NVSHMEM_CMP_GT = 2,
    NVSHMEM_CMP_LE = 3,
    NVSHMEM_CMP_LT = 4,
    NVSHMEM_CMP_GE = 5
};
enum { NVSHMEM_TEAM_INVALID = -1, NVSHMEM_TEAM_WORLD = 0 };
enum {
    STATUS_NOT_INITIALIZED,
    STATUS_IS_BOOTSTRAPPED,
    STATUS_IS_INITIALIZED,
    STATUS_LIMITED_MPG,
    STATUS_FULL_MPG
};
enum { NVSHMEMX_INIT_WITH_UNIQUEID = 8 };
