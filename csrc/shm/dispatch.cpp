// Selects the method for an operation code.
#include "shm/dispatch.hpp"

namespace unicomm::shm {

Op op_of(uint32_t code, int dtype, int red, int root, uint64_t count, uint64_t extra, double timeout) {
    Op op;
    op.code = code;
    op.dtype = static_cast<DType>(dtype);
    op.red = static_cast<Red>(red);
    op.root = root;
    op.count = count;
    op.extra = extra;
    op.deadline_ns = deadline_after(timeout);
    return op;
}

std::vector<Buffer> equal_parts(const Tensor& t, int n) {
    std::vector<Buffer> out;
    uint64_t each = static_cast<uint64_t>(t.bytes) / static_cast<uint64_t>(n);
    char* at = static_cast<char*>(t.data);
    for (int r = 0; r < n; ++r, at += each) out.push_back({at, each});
    return out;
}

namespace {

template <class... Codes>
constexpr uint32_t set_of(Codes... codes) {
    return ((1u << static_cast<uint32_t>(codes)) | ...);
}
bool in(uint32_t set, OpCode code) { return set >> static_cast<uint32_t>(code) & 1; }

constexpr uint32_t kAllToAlls = set_of(OpCode::kAllToAllSingle, OpCode::kAllToAllVSingle, OpCode::kAllToAll);
constexpr uint32_t kCutInputs = kAllToAlls | set_of(OpCode::kReduceScatter, OpCode::kReduceScatterV,
                                                    OpCode::kReduceScatterSingle, OpCode::kScatter);
constexpr uint32_t kCutOutputs =
    kAllToAlls | set_of(OpCode::kAllGather, OpCode::kAllGatherV, OpCode::kAllGatherSingle, OpCode::kGather,
                        OpCode::kGatherSingle);
constexpr uint32_t kReductions = set_of(OpCode::kAllReduce, OpCode::kReduce, OpCode::kReduceScatter,
                                        OpCode::kReduceScatterV, OpCode::kReduceScatterSingle);

}  // namespace

bool cuts_input(OpCode code) { return in(kCutInputs, code); }
bool reduces(OpCode code) { return in(kReductions, code); }
bool cuts_output(OpCode code) { return in(kCutOutputs, code); }

Fault Group::collective(const Op& op, const Tensor& in, const Tensor& out) {
    const auto code = static_cast<OpCode>(op.code);
    if (code == OpCode::kAllReduce && world_ > 1) {  // the most frequent operation: no lists of parts
        return all_reduce(op, static_cast<char*>(in.data), static_cast<char*>(out.data), op.count);
    }
    if (world_ == 1) {
        if (code != OpCode::kBarrier) alone(op, buffer_of(in), buffer_of(out));
        return {};
    }
    if (code == OpCode::kBarrier) return barrier(op);
    if (code == OpCode::kBroadcast) return broadcast(op, buffer_of(out));
    return dispatch(*this, op, equal_parts(in, cuts_input(code) ? world_ : 1),
                    equal_parts(out, cuts_output(code) ? world_ : 1), op.count);
}

Fault dispatch(Group& g, const Op& op, const std::vector<Buffer>& ins, const std::vector<Buffer>& outs,
               uint64_t elements) {
    if (g.world() == 1) {
        if (!ins.empty() && !outs.empty()) g.alone(op, ins[0], outs[0]);
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
