#include "hosts/fast.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/hash.hpp"
#include "operations/opcode.hpp"
#include "reduce/fold.hpp"
#include "shm/dispatch.hpp"

namespace unicomm::hosts {
namespace {

using shm::Buffer;
using shm::Op;

ucx::Fast* operations_of(const nb::object& object) {
    return object.is_none() ? nullptr : &nb::cast<ucx::Fast&>(object);
}

// Narrow floats are carried in float32, which the general path does.
bool carried_as_it_is(DType dtype, Red red) {
    const bool narrow = dtype == DType::kFloat16 || dtype == DType::kBFloat16 ||
                        dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
    return !narrow || !(red == Red::kSum || red == Red::kProduct || red == Red::kAvg);
}

// Every rank gets all of every rank's input, and takes of it what it wants.
bool gathers(OpCode code) { return code == OpCode::kAllGatherSingle || code == OpCode::kAllToAllSingle; }

bool reduces(OpCode code) { return code == OpCode::kAllReduce || code == OpCode::kReduceScatterSingle; }

Op part_of(OpCode code, uint64_t deadline, int root = -1) {
    Op op;
    op.code = static_cast<uint32_t>(code);
    op.root = root;
    op.deadline_ns = deadline;
    if (code != OpCode::kBarrier) op.dtype = DType::kUInt8;
    return op;
}

}  // namespace

uint64_t signature(uint32_t op, uint32_t dtype, uint32_t how, int root, uint64_t count, uint64_t extra) {
    uint64_t hash = mix(0, op);
    for (uint64_t value : {uint64_t(dtype), uint64_t(how), uint64_t(uint32_t(root)), count, extra}) {
        hash = mix(hash, value);
    }
    return hash;
}

Fast::Fast(nb::object near, nb::object far, nb::object leaders, std::vector<std::vector<int>> hosts, int rank,
           double slack, double for_others, nb::handle supervisor)
    : near_object_(std::move(near)),
      far_object_(std::move(far)),
      leaders_object_(std::move(leaders)),
      supervisor_(nb::steal(PyWeakref_NewRef(supervisor.ptr(), nullptr))),
      near_(&nb::cast<shm::Group&>(near_object_)),
      far_(nb::cast<ucx::Fast&>(far_object_)),
      leaders_(operations_of(leaders_object_)),
      hosts_(std::move(hosts)),
      most_(ucx::Slots::most(int(hosts_.size()))),
      rank_(rank),
      slack_(slack),
      for_others_(for_others),
      host_of_(size_t(far_.world())),
      local_of_(size_t(far_.world())),
      slot_(kHead + most_),
      answer_(kHead + most_ * hosts_.size()) {
    if (!supervisor_.is_valid()) throw nb::python_error();
    for (size_t h = 0; h < hosts_.size(); ++h) {
        largest_ = std::max(largest_, hosts_[h].size());
        for (size_t i = 0; i < hosts_[h].size(); ++i) {
            const size_t r = size_t(hosts_[h][i]);
            host_of_.at(r) = int(h);
            local_of_.at(r) = int(i);
        }
    }
    host_ = host_of_.at(size_t(rank));
    local_ = local_of_.at(size_t(rank));
    if (is_leader() != (local_ == 0)) throw nb::value_error("the first rank of a host is its leader");
}

void Fast::close() {
    near_ = nullptr;
    near_object_ = nb::none();
}

uint64_t Fast::later(uint64_t deadline, double seconds) const {
    return deadline == ~uint64_t{0} ? deadline : deadline + uint64_t(seconds * 1e9);
}

Fault Fast::in_part(Part part, Fault fault) {
    if (fault) failed_in_ = part;
    return fault;
}

// --- collectives ------------------------------------------------------------------------------------------

bool Fast::fits(const Op& op, const Tensor& in) const {
    const size_t bytes = size_t(in.bytes);
    switch (static_cast<OpCode>(op.code)) {
        case OpCode::kBarrier:
            return true;
        case OpCode::kBroadcast:
            return bytes <= most_;
        case OpCode::kAllReduce:
            return bytes <= most_ && carried_as_it_is(op.dtype, op.red);
        case OpCode::kReduceScatterSingle:
            return bytes <= ucx::Slots::kMostCut && carried_as_it_is(op.dtype, op.red);
        case OpCode::kAllGatherSingle:
            return largest_ * bytes <= most_;
        case OpCode::kAllToAllSingle:
            return largest_ * bytes <= ucx::Slots::kMostCut;
        default:
            return false;
    }
}

bool Fast::begins(const Op& op, const Tensor& in) {
    if (near_ == nullptr || !fits(op, in) || !far_.usable() || (leaders_ && !leaders_->usable()))
        return false;
    if (leaders_) leaders_->begins(part_of(OpCode::kBarrier, 0), {});
    far_.counts().inside = op.code;
    return true;
}

Fault Fast::collective(const Op& op, const Tensor& in, const Tensor& out) {
    Fault fault = stepped(op, in, out);
    far_.counts().inside = 0;
    return fault;
}

Fault Fast::stepped(const Op& op, const Tensor& in, const Tensor& out) {
    Step step{signature(op.code, uint32_t(op.dtype), uint32_t(op.red), op.root, op.count, op.extra),
              op.deadline_ns};
    failed_in_ = Part::kNone;
    bool alike = true, good = false;
    if (Fault fault = gather_near(op, in, step)) {
        alike = fault.code != FaultCode::kMismatch;
        if (alike) return in_part(Part::kNear, std::move(fault));
    }
    if (is_leader()) {
        const uint64_t head[] = {step.signature, alike};
        std::memset(slot_.data(), 0, kHead);
        std::memcpy(slot_.data(), head, sizeof head);
        Fault fault = leaders_->swap_slots(slot_.data(), kHead + (alike ? step.given : 0),
                                           later(step.deadline, slack_));
        if (fault) return in_part(Part::kLeaders, std::move(fault));
        good = true;
        for (int h = 0; h < int(hosts_.size()); ++h) {
            good &= std::memcmp(leaders_->slot_data(h), head, sizeof head) == 0 && head[1];
        }
        if (good && !combine(op, step)) {
            return in_part(Part::kLeaders, {FaultCode::kInternal, {}, {}, "a slot of another size"});
        }
        answer_[0] = good;
    }
    if (alike && members().size() > 1) {
        std::lock_guard lock(near_->running());
        Fault fault = near_->broadcast(part_of(OpCode::kBroadcast, later(step.deadline, for_others_), 0),
                                       {answer_.data(), kHead + step.result});
        if (fault) return in_part(Part::kLate, std::move(fault));
        good = answer_[0] != 0;
    }
    if (!good) {
        // All ranks are in step, and learn from each other what they called.
        ucx::ask(supervisor_, "explain", op.code, uint32_t(op.dtype), uint32_t(op.red), op.root, op.count);
        return {FaultCode::kMismatch, {}, {}, {}};
    }
    deliver(op, in, out);
    return {};
}

// The ranks of the host compare what they call, and the leader gets its host's part.
Fault Fast::gather_near(const Op& op, const Tensor& in, Step& step) {
    const auto code = static_cast<OpCode>(op.code);
    const size_t bytes = size_t(in.bytes), here = members().size();
    Op local = part_of(OpCode::kBarrier, step.deadline);
    std::lock_guard lock(near_->running());
    if (reduces(code)) {
        step.given = bytes;
        step.result = bytes;
        local = part_of(OpCode::kReduce, step.deadline, 0);
        local.dtype = op.dtype;
        local.red = op.red == Red::kAvg ? Red::kSum : op.red;
        local.extra = step.signature;
        std::vector<char> ordered;
        const char* values = static_cast<const char*>(in.data);
        if (code == OpCode::kReduceScatterSingle) {  // the parts in the order of hosts
            const size_t part = bytes / host_of_.size();
            for (const auto& ranks : hosts_) {
                for (int r : ranks) {
                    const char* at = values + size_t(r) * part;
                    ordered.insert(ordered.end(), at, at + part);
                }
            }
            values = ordered.data();
        }
        if (here == 1) {
            if (bytes) std::memcpy(mine(), values, bytes);
            return {};
        }
        return near_->all_reduce(local, values, is_leader() ? mine() : nullptr, uint64_t(in.numel));
    }
    if (gathers(code)) {
        step.given = bytes * here;
        step.result = bytes * host_of_.size();
        if (here == 1) {
            if (bytes) std::memcpy(mine(), in.data, bytes);
            return {};
        }
        local = part_of(OpCode::kAllGatherV, step.deadline);
        local.extra = step.signature;
        std::vector<Buffer> places;
        for (size_t i = 0; i < here; ++i) places.push_back({mine() + i * bytes, bytes});
        return near_->all_gather(local, {static_cast<char*>(in.data), bytes}, places);
    }
    if (code == OpCode::kBroadcast) {
        step.result = bytes;
        const int root = op.root;
        if (host_of_[size_t(root)] == host_) {
            step.given = bytes;
            if (root == rank_ && bytes) std::memcpy(mine(), in.data, bytes);
            local = part_of(OpCode::kBroadcast, step.deadline, local_of_[size_t(root)]);
            local.extra = step.signature;
            return here == 1 ? Fault{} : near_->broadcast(local, {mine(), bytes});
        }
    }
    local.extra = step.signature;
    return here == 1 ? Fault{} : near_->barrier(local);
}

const char* Fast::slot_of(int host, size_t bytes) const {
    return leaders_->slot_bytes(host) < kHead + bytes ? nullptr : leaders_->slot_data(host) + kHead;
}

// Makes the answer of all hosts' slots. False if one is too short.
bool Fast::combine(const Op& op, const Step& step) {
    const auto code = static_cast<OpCode>(op.code);
    char* const to = answer_.data() + kHead;
    if (reduces(code)) {
        std::vector<const void*> parts;
        for (int h = 0; h < int(hosts_.size()); ++h) {
            const char* part = slot_of(h, step.given);
            if (part == nullptr) return false;
            parts.push_back(part);
        }
        const int64_t count = int64_t(step.given) / dtype_bytes(op.dtype);
        const Red between = op.red == Red::kAvg ? Red::kSum : op.red;
        if (!fold(op.dtype, between, to, parts.data(), int(parts.size()), count, nullptr, int(parts.size())))
            return false;
        const void* total = to;
        return op.red != Red::kAvg || fold(op.dtype, Red::kAvg, to, &total, 1, count, nullptr, world());
    }
    if (gathers(code)) {
        const size_t each = step.result / host_of_.size();
        char* at = to;
        for (size_t h = 0; h < hosts_.size(); ++h) {
            const size_t bytes = each * hosts_[h].size();
            const char* part = slot_of(int(h), bytes);
            if (part == nullptr) return false;
            std::memcpy(at, part, bytes);
            at += bytes;
        }
    } else if (code == OpCode::kBroadcast) {
        const char* part = slot_of(host_of_[size_t(op.root)], step.result);
        if (part == nullptr) return false;
        std::memcpy(to, part, step.result);
    }
    return true;
}

// Copies the answer to where this rank wants it.
void Fast::deliver(const Op& op, const Tensor& in, const Tensor& out) const {
    const auto code = static_cast<OpCode>(op.code);
    const char* const from = answer_.data() + kHead;
    char* const to = static_cast<char*>(out.data);
    const size_t bytes = size_t(out.bytes);
    if (bytes == 0) return;
    if (code == OpCode::kAllReduce || code == OpCode::kBroadcast) {
        if (op.root != rank_) std::memcpy(to, from, bytes);
        return;
    }
    // The answer has, for each rank in the order of hosts, its whole input, or its part of the sum.
    const size_t n = host_of_.size(), each = gathers(code) ? size_t(in.bytes) : bytes;
    const char* at = from;
    for (const auto& ranks : hosts_) {
        for (int r : ranks) {
            if (code == OpCode::kAllGatherSingle) {
                std::memcpy(to + size_t(r) * each, at, each);
            } else if (code == OpCode::kAllToAllSingle) {
                std::memcpy(to + size_t(r) * (each / n), at + size_t(rank_) * (each / n), each / n);
            } else if (r == rank_ && code == OpCode::kReduceScatterSingle) {
                std::memcpy(to, at, each);
            }
            at += each;
        }
    }
}

// --- messages ---------------------------------------------------------------------------------------------

bool Fast::begins(const std::vector<shm::Message>& messages) {
    if (near_ == nullptr || !far_.usable()) return false;
    size_t near = 0;
    for (const shm::Message& m : messages) near += host_of_[size_t(m.peer)] == host_;
    if (near == messages.size()) return true;
    return near == 0 && far_.begins(messages);
}

Fault Fast::exchange(const std::vector<shm::Message>& messages, uint64_t deadline_ns) {
    failed_in_ = Part::kNone;
    if (host_of_[size_t(messages[0].peer)] != host_) {
        return in_part(Part::kFar, far_.exchange(messages, deadline_ns));
    }
    std::vector<shm::Message> local = messages;
    for (shm::Message& m : local) m.peer = local_of_[size_t(m.peer)];
    std::lock_guard lock(near_->running());
    return in_part(Part::kNear, near_->exchange(local, deadline_ns));
}

}  // namespace unicomm::hosts
