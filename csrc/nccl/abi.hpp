// The C interface that NCCL and RCCL share, declared here: building needs neither library's header, and one
// wheel serves both. Each function is declared once in the list below, with the version of NCCL that
// introduced it (X-macro: name, since, type). A function that the opened library lacks is a null pointer.
// Source of names, versions and layouts: the public headers of NCCL 2.18 to 2.32 and RCCL 2.21 to 2.28.
#pragma once
#include <cstddef>
#include <cstdint>

namespace unicomm::nccl {

using Comm = void*;
using Window = void*;
using Stream = void*;  // cudaStream_t or hipStream_t

struct UniqueId {
    char bytes[128];
};

enum Result : int { kSuccess = 0, kInProgress = 7 };

struct WaitSignalDesc {
    int count, peer, signal, context;
};

// As in NCCL 2.32. Older layouts are prefixes of it: `size` tells which.
struct Config {
    size_t size;
    uint32_t magic;
    uint32_t version;
    int blocking;
    int cgaClusterSize;
    int minCTAs;
    int maxCTAs;
    const char* netName;
    int splitShare;
    int trafficClass;
    const char* commName;
    int collnetEnable;
    int CTAPolicy;
    int shrinkShare;
    int nvlsCTAs;
    int nChannelsPerNetPeer;
    int nvlinkCentricSched;
    int graphUsageMode;
    int numRmaCtx;
    int maxP2pPeers;
    int graphStreamOrdering;
    int launchOrderImplicit;
    int numRmaSig;
    int rmaEagerInit;
    int hostCftMode;
    int nvlsHostMode;
};
constexpr uint32_t kMagic = 0xcafebeef;
constexpr int kNewestConfig = 23200;  // the version of NCCL that the struct is from

constexpr int version_code(int major, int minor, int patch = 0) {
    return major * 10000 + minor * 100 + patch;
}

// clang-format off
#define UNICOMM_NCCL_FUNCTIONS(X)                                                                              \
    X(GetVersion, 0, int(int*))                                                                                \
    X(GetUniqueId, 0, int(UniqueId*))                                                                          \
    X(GetErrorString, 0, const char*(int))                                                                     \
    X(GetLastError, version_code(2, 13), const char*(Comm))                                                    \
    X(CommInitRank, 0, int(Comm*, int, UniqueId, int))                                                         \
    X(CommInitRankConfig, version_code(2, 14), int(Comm*, int, UniqueId, int, Config*))                        \
    X(CommInitRankScalable, version_code(2, 23), int(Comm*, int, int, int, UniqueId*, Config*))                \
    X(CommFinalize, version_code(2, 14), int(Comm))                                                            \
    X(CommDestroy, 0, int(Comm))                                                                               \
    X(CommAbort, 0, int(Comm))                                                                                 \
    X(CommRevoke, version_code(2, 28, 7), int(Comm, int))                                                      \
    X(CommSplit, version_code(2, 18), int(Comm, int, int, Comm*, Config*))                                     \
    X(CommShrink, version_code(2, 27), int(Comm, int*, int, Comm*, Config*, int))                              \
    X(CommGetUniqueId, version_code(2, 29, 2), int(Comm, UniqueId*))                                           \
    X(CommGrow, version_code(2, 29, 2), int(Comm, int, const UniqueId*, int, Comm*, Config*))                  \
    X(CommGetAsyncError, 0, int(Comm, int*))                                                                   \
    X(CommCount, 0, int(Comm, int*))                                                                           \
    X(CommCuDevice, 0, int(Comm, int*))                                                                        \
    X(CommUserRank, 0, int(Comm, int*))                                                                        \
    X(CommSuspend, version_code(2, 29, 7), int(Comm, int))                                                     \
    X(CommResume, version_code(2, 29, 7), int(Comm))                                                           \
    X(CommMemStats, version_code(2, 29, 7), int(Comm, int, uint64_t*))                                         \
    X(CommRegister, version_code(2, 19), int(Comm, void*, size_t, void**))                                     \
    X(CommDeregister, version_code(2, 19), int(Comm, void*))                                                   \
    X(CommWindowRegister, version_code(2, 27), int(Comm, void*, size_t, Window*, int))                         \
    X(CommWindowDeregister, version_code(2, 27), int(Comm, Window))                                            \
    X(WinGetUserPtr, version_code(2, 29, 2), int(Comm, Window, void**))                                        \
    X(GetPeerDevicePointer, version_code(2, 29, 2), int(Window, size_t, int, void**))                          \
    X(MemAlloc, version_code(2, 19), int(void**, size_t))                                                      \
    X(MemFree, version_code(2, 19), int(void*))                                                                \
    X(RedOpCreatePreMulSum, version_code(2, 11), int(int*, void*, int, int, Comm))                             \
    X(RedOpDestroy, version_code(2, 11), int(int, Comm))                                                       \
    X(GroupStart, 0, int())                                                                                    \
    X(GroupEnd, 0, int())                                                                                      \
    X(AllReduce, 0, int(const void*, void*, size_t, int, int, Comm, Stream))                                   \
    X(Reduce, 0, int(const void*, void*, size_t, int, int, int, Comm, Stream))                                 \
    X(Broadcast, 0, int(const void*, void*, size_t, int, int, Comm, Stream))                                   \
    X(AllGather, 0, int(const void*, void*, size_t, int, Comm, Stream))                                        \
    X(ReduceScatter, 0, int(const void*, void*, size_t, int, int, Comm, Stream))                               \
    X(AlltoAll, version_code(2, 28), int(const void*, void*, size_t, int, Comm, Stream))                       \
    X(Gather, version_code(2, 28), int(const void*, void*, size_t, int, int, Comm, Stream))                    \
    X(Scatter, version_code(2, 28), int(const void*, void*, size_t, int, int, Comm, Stream))                   \
    X(Send, version_code(2, 7), int(const void*, size_t, int, int, Comm, Stream))                              \
    X(Recv, version_code(2, 7), int(void*, size_t, int, int, Comm, Stream))                                    \
    X(PutSignal, version_code(2, 29, 2),                                                                       \
      int(const void*, size_t, int, int, Window, size_t, int, int, unsigned, Comm, Stream))                    \
    X(Signal, version_code(2, 29, 2), int(int, int, int, unsigned, Comm, Stream))                              \
    X(WaitSignal, version_code(2, 29, 2), int(int, WaitSignalDesc*, Comm, Stream))
// clang-format on

}  // namespace unicomm::nccl
