// The C ABI that NCCL and RCCL share, declared anew for the mock.
#pragma once
#include <climits>
#include <cstddef>
#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace mock_nccl {

enum Result : int {
    kSuccess = 0,
    kUnhandledCudaError = 1,
    kSystemError = 2,
    kInternalError = 3,
    kInvalidArgument = 4,
    kInvalidUsage = 5,
    kRemoteError = 6,
    kInProgress = 7,
    kTimeout = 8,
};

enum DataType : int {
    kInt8,
    kUint8,
    kInt32,
    kUint32,
    kInt64,
    kUint64,
    kFloat16,
    kFloat32,
    kFloat64,
    kBfloat16,
    kFloat8e4m3,
    kFloat8e5m2,
    kDataTypes
};
enum RedOp : int { kSum, kProd, kMax, kMin, kAvg, kFirstOwnOp };
enum Residence : int { kScalarDevice = 0, kScalarHost = 1 };

constexpr int kUndefined = INT_MIN;
constexpr unsigned kMagic = 0xcafebeef;
constexpr int kNoColor = -1;
constexpr int kShrinkAbort = 1;
constexpr int kSuspendMemory = 1;
constexpr int kWindowAlignment = 4096;

struct UniqueId {
    char internal[128];
};

struct Config {
    size_t size;
    unsigned magic;
    unsigned version;
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
static_assert(sizeof(Config) == 120 && offsetof(Config, netName) == 32 && offsetof(Config, commName) == 48 &&
              offsetof(Config, maxP2pPeers) == 88 && offsetof(Config, nvlsHostMode) == 112);

// The head of what a call of 2.32 brings for one collective; nothing in it changes what the mock does.
struct CollConfig {
    size_t size;
    unsigned magic;
    unsigned version;
};

struct SimInfo {
    size_t size;
    unsigned magic;
    unsigned version;
    float estimatedTime;
};

struct WaitSignalDesc {
    int opCnt;
    int peer;
    int sigIdx;
    int ctx;
};

using CommHandle = void*;
using WindowHandle = void*;
using StreamHandle = void*;

}  // namespace mock_nccl
