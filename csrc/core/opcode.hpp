// The operations' numbers as unicomm/comms/ops.py has them; a test compares the two.
#pragma once
#include <cstdint>

namespace unicomm {

enum class OpCode : uint32_t {
    kSend = 1,
    kRecv = 2,
    kBroadcast = 3,
    kAllReduce = 4,
    kReduce = 5,
    kAllGather = 6,
    kAllGatherV = 7,
    kAllGatherSingle = 8,
    kReduceScatter = 9,
    kReduceScatterV = 10,
    kReduceScatterSingle = 11,
    kAllToAllSingle = 12,
    kAllToAllVSingle = 13,
    kAllToAll = 14,
    kBarrier = 15,
    kScatter = 16,
    kGather = 17,
    kGatherSingle = 18,
};

}  // namespace unicomm
