#include "shm/dispatch.hpp"

#include "recorder/ring.hpp"

namespace unicomm::shm {

std::vector<Piece> equal_parts(const Tensor& t, int n) {
    std::vector<Piece> out;
    uint64_t each = static_cast<uint64_t>(t.bytes) / static_cast<uint64_t>(n);
    char* at = static_cast<char*>(t.data);
    for (int r = 0; r < n; ++r, at += each) out.push_back({at, each});
    return out;
}

bool cuts_input(OpCode code) {
    switch (code) {
        case OpCode::kReduceScatter:
        case OpCode::kReduceScatterV:
        case OpCode::kReduceScatterSingle:
        case OpCode::kScatter:
        case OpCode::kAllToAllSingle:
        case OpCode::kAllToAllVSingle:
        case OpCode::kAllToAll:
            return true;
        default:
            return false;
    }
}

bool cuts_output(OpCode code) {
    switch (code) {
        case OpCode::kAllGather:
        case OpCode::kAllGatherV:
        case OpCode::kAllGatherSingle:
        case OpCode::kGather:
        case OpCode::kGatherSingle:
        case OpCode::kAllToAllSingle:
        case OpCode::kAllToAllVSingle:
        case OpCode::kAllToAll:
            return true;
        default:
            return false;
    }
}

uint64_t deadline_after(double seconds) {
    uint64_t now = ring::now_ns();
    return seconds > 1e9 ? ~uint64_t{0} : now + static_cast<uint64_t>(seconds * 1e9);
}

Fault dispatch(Group& g, const Op& op, const std::vector<Piece>& ins, const std::vector<Piece>& outs,
               uint64_t elements) {
    if (g.world() == 1) {
        g.alone(op, ins, outs);
        return {};
    }
    switch (static_cast<OpCode>(op.code)) {
        case OpCode::kBarrier:
            return g.barrier(op);
        case OpCode::kBroadcast:
            return g.broadcast(op, outs[0]);
        case OpCode::kAllReduce:
            return g.all_reduce(op, ins[0].data, outs[0].data, elements);
        case OpCode::kReduce:
            return g.all_reduce(op, ins[0].data, g.rank() == op.root ? outs[0].data : nullptr, elements);
        case OpCode::kAllGather:
        case OpCode::kAllGatherV:
        case OpCode::kAllGatherSingle:
            return g.all_gather(op, ins[0], outs);
        case OpCode::kReduceScatter:
        case OpCode::kReduceScatterV:
        case OpCode::kReduceScatterSingle:
            return g.reduce_scatter(op, ins, outs[0]);
        case OpCode::kAllToAllSingle:
            return g.all_to_all(op, ins, outs, false);
        case OpCode::kAllToAllVSingle:
        case OpCode::kAllToAll:
            return g.all_to_all(op, ins, outs, true);
        case OpCode::kScatter:
            return g.scatter(op, ins, outs[0]);
        case OpCode::kGather:
        case OpCode::kGatherSingle:
            return g.gather(op, ins[0], outs);
        default:
            return {
                FaultCode::kInternal, {}, {}, "operation " + std::to_string(op.code) + " is no collective"};
    }
}

}  // namespace unicomm::shm
