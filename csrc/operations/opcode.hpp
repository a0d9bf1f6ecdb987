// Codes of the operations, as unicomm/comms/operations/table.py has them; a test compares the two.
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

constexpr int kOpCodes = 19;

inline const char* name_of(OpCode code) {
    static constexpr const char* names[kOpCodes] = {"",
                                                    "send",
                                                    "recv",
                                                    "broadcast",
                                                    "all_reduce",
                                                    "reduce",
                                                    "all_gather",
                                                    "all_gather_v",
                                                    "all_gather_single",
                                                    "reduce_scatter",
                                                    "reduce_scatter_v",
                                                    "reduce_scatter_single",
                                                    "all_to_all_single",
                                                    "all_to_all_v_single",
                                                    "all_to_all",
                                                    "barrier",
                                                    "scatter",
                                                    "gather",
                                                    "gather_single"};
    return names[static_cast<uint32_t>(code)];
}

}  // namespace unicomm
