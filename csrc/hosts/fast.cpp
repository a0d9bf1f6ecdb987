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
using shm::cuts_input;
using shm::Op;
using shm::reduces;

// Bytes of a host's ranks for those of another one that their leaders exchange. Straight from rank to rank
// there are fewer copies, but more messages.
constexpr size_t kMostAllToAll = 1 << 14;

ucx::Fast* operations_of(const nb::object& object) {
    return object.is_none() ? nullptr : &nb::cast<ucx::Fast&>(object);
}

// Whether the leaders fold the values of all ranks at once. That rounds narrow floats once; where they are
// too many for a slot, the general path carries them in float32.
bool folds_all_ranks(OpCode code, DType t, Red red) {
    const bool narrow =
        t == DType::kFloat16 || t == DType::kBFloat16 || t == DType::kFloat8E4M3 || t == DType::kFloat8E5M2;
    return reduces(code) && narrow && (red == Red::kSum || red == Red::kProduct || red == Red::kAvg);
}

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
    : SupervisedOperations(supervisor),
      near_object_(std::move(near)),
      far_object_(std::move(far)),
      leaders_object_(std::move(leaders)),
      near_(&nb::cast<shm::Group&>(near_object_)),
      far_(nb::cast<ucx::Fast&>(far_object_)),
      leaders_(operations_of(leaders_object_)),
      hosts_(std::move(hosts)),
      most_(ucx::Slots::most_of_host(int(hosts_.size()))),
      most_for_each_(ucx::Slots::most_of_host_for_each(int(hosts_.size()))),
      rank_(rank),
      slack_(slack),
      for_others_(for_others),
      host_of_(size_t(far_.world())),
      local_of_(size_t(far_.world())),
      mine_(std::make_unique_for_overwrite<char[]>(most_for_each_ * hosts_.size())),
      packed_(std::make_unique_for_overwrite<char[]>(most_for_each_ * hosts_.size())),
      answer_(std::make_unique_for_overwrite<char[]>(kHead + most_for_each_ * hosts_.size())) {
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

bool Fast::fits(OpCode code, DType dtype, Red red, size_t bytes) const {
    // What a host gives for each result: one partial result, or the values of all its ranks.
    const size_t values = folds_all_ranks(code, dtype, red) ? largest_ : 1;
    switch (code) {
        case OpCode::kBarrier:
            return true;
        case OpCode::kBroadcast:
            return bytes <= most_;
        case OpCode::kAllReduce:
            return values * bytes <= most_;
        case OpCode::kReduceScatterSingle:
            return values * largest_ * (bytes / host_of_.size()) <= most_for_each_;
        case OpCode::kAllGatherSingle:
            return largest_ * bytes <= most_;
        case OpCode::kAllToAllSingle:
            return goes_by_leaders(bytes) || far_.fits(code, bytes);
        default:
            return false;
    }
}

// Whether the leaders exchange the data of an all-to-all.
bool Fast::goes_by_leaders(size_t bytes) const {
    return largest_ * largest_ * (bytes / host_of_.size()) <= kMostAllToAll;
}

bool Fast::begins(const Op& op, const Tensor& in) {
    if (near_ == nullptr || !far_.usable() || (leaders_ && !leaders_->usable())) return false;
    if (!fits(static_cast<OpCode>(op.code), op.dtype, op.red, size_t(in.bytes))) return false;
    if (leaders_) leaders_->begin_part();
    return true;
}

// Called without the GIL.
void Fast::begin_leaders() {
    if (leaders_ == nullptr) return;
    nb::gil_scoped_acquire gil;
    leaders_->begin_part();
}

Fault Fast::run_alone(const Op& op, const Tensor& in, const Tensor& out) {
    begin_leaders();
    return collective(op, in, out);
}

Fault Fast::collective(const Op& op, const Tensor& in, const Tensor& out) {
    far_.counts().inside = op.code;
    Fault fault = stepped(op, in, out);
    far_.counts().inside = 0;
    return fault;
}

Fault Fast::stepped(const Op& op, const Tensor& in, const Tensor& out) {
    const bool straight = op.code == uint32_t(OpCode::kAllToAllSingle) && !goes_by_leaders(size_t(in.bytes));
    const uint64_t signed_as =
        signature(op.code, uint32_t(op.dtype), uint32_t(op.red), op.root, op.count, op.extra);
    Fault fault = first_step(straight ? part_of(OpCode::kBarrier, op.deadline_ns) : op, in, signed_as);
    if (fault.code == FaultCode::kMismatch) {
        // All ranks are in step, and learn from each other what they called.
        ask("explain", op.code, uint32_t(op.dtype), uint32_t(op.red), op.root, op.count, op.extra);
    } else if (!fault && straight) {
        return go_straight(op, in, out, signed_as);
    } else if (!fault) {
        deliver(op, in, out);
    }
    return fault;
}

// An all-to-all from rank to rank. Large parts for ranks of this host go through its memory.
Fault Fast::go_straight(const Op& op, const Tensor& in, const Tensor& out, uint64_t signed_as) {
    const size_t part = size_t(in.bytes) / host_of_.size();
    const bool apart = largest_ > 1 && !far_.in_slots(OpCode::kAllToAllSingle, size_t(in.bytes));
    if (apart) {
        Op local = part_of(OpCode::kAllToAllSingle, op.deadline_ns);
        local.extra = signed_as;
        std::vector<Buffer> ins, outs;
        for (int r : members()) {
            ins.push_back({static_cast<char*>(in.data) + size_t(r) * part, part});
            outs.push_back({static_cast<char*>(out.data) + size_t(r) * part, part});
        }
        std::lock_guard lock(near_->running());
        if (Fault fault = shm::dispatch(*near_, local, ins, outs, part)) {
            return in_part(Part::kNear, std::move(fault));
        }
    }
    {
        nb::gil_scoped_acquire gil;
        far_.begin_part(OpCode::kAllToAllSingle);
    }
    return in_part(Part::kFar,
                   apart ? far_.all_to_others(op, in, out, members()) : far_.collective(op, in, out));
}

Fault Fast::agree(uint64_t signed_as, uint64_t deadline_ns) {
    std::lock_guard lock(running());
    begin_leaders();
    return first_step(part_of(OpCode::kBarrier, deadline_ns), {}, signed_as);
}

// All ranks compare what they call, and exchange what `op` moves.
Fault Fast::first_step(const Op& op, const Tensor& in, uint64_t signed_as) {
    Given given;
    failed_in_ = Part::kNone;
    bool alike = true, good = false;
    if (Fault fault = gather_near(op, in, signed_as, given)) {
        alike = fault.code != FaultCode::kMismatch;
        if (alike) return in_part(Part::kNear, std::move(fault));
    }
    if (is_leader()) {
        uint64_t head[kHead / sizeof(uint64_t)] = {signed_as, alike};
        if (!alike) given.pieces = {{}};
        Fault fault = leaders_->swap_slots({reinterpret_cast<const char*>(head), kHead}, given.pieces,
                                           later(op.deadline_ns, slack_));
        if (fault) return in_part(Part::kLeaders, std::move(fault));
        good = alike;
        for (int h = 0; h < int(hosts_.size()); ++h) {
            good &= slot_of(h, 0) != nullptr && std::memcmp(leaders_->slot_data(h), head, kHead) == 0;
        }
        if (good && !combine(op, given)) {
            return in_part(Part::kLeaders, {FaultCode::kInternal, {}, {}, "a slot of another size"});
        }
        answer_[0] = good;
    }
    if (alike && members().size() > 1) {
        std::lock_guard lock(near_->running());
        Fault fault = near_->broadcast(part_of(OpCode::kBroadcast, later(op.deadline_ns, for_others_), 0),
                                       {answer_.get(), kHead + given.result});
        if (fault) return in_part(Part::kLate, std::move(fault));
        good = answer_[0] != 0;
    }
    return good ? Fault{} : Fault{FaultCode::kMismatch, {}, {}, {}};
}

// The ranks of the host compare what they call, and the leader gets its host's data.
Fault Fast::gather_near(const Op& op, const Tensor& in, uint64_t signed_as, Given& given) {
    const auto code = static_cast<OpCode>(op.code);
    const size_t bytes = size_t(in.bytes), here = members().size(), n = host_of_.size();
    char* const mine = mine_.get();
    const bool all_ranks = folds_all_ranks(code, op.dtype, op.red);
    Op local = part_of(OpCode::kBarrier, op.deadline_ns);
    std::lock_guard lock(near_->running());
    if (reduces(code) && !all_ranks) {
        const char* values = static_cast<const char*>(in.data);
        if (code == OpCode::kReduceScatterSingle) {  // the parts in the order of hosts
            char* to = packed_.get();
            for (const auto& ranks : hosts_) {
                for (int r : ranks) {
                    if (bytes) std::memcpy(to, values + size_t(r) * (bytes / n), bytes / n);
                    to += bytes / n;
                }
            }
            values = packed_.get();
        }
        local = part_of(OpCode::kReduce, op.deadline_ns, 0);
        local.dtype = op.dtype;
        local.red = op.red == Red::kAvg ? Red::kSum : op.red;
        local.extra = signed_as;
        given.pieces = {{mine, bytes}};
        given.result = bytes;
        if (code == OpCode::kReduceScatterSingle) cut(code, bytes, given);
        if (here == 1) {
            if (bytes) std::memcpy(mine, values, bytes);
            return {};
        }
        return near_->all_reduce(local, values, is_leader() ? mine : nullptr, uint64_t(in.numel));
    }
    if (code == OpCode::kAllGatherSingle || code == OpCode::kAllToAllSingle || all_ranks) {
        local = part_of(OpCode::kAllGatherV, op.deadline_ns);
        local.extra = signed_as;
        std::vector<Buffer> places;
        for (size_t i = 0; i < here; ++i) places.push_back({mine + i * bytes, bytes});
        Fault fault;
        if (here > 1) {
            fault = near_->all_gather(local, {static_cast<char*>(in.data), bytes}, places);
        } else if (bytes) {
            std::memcpy(mine, in.data, bytes);
        }
        given.pieces = {{mine, bytes * here}};
        given.result = bytes * n;
        if (cuts_input(code) && !fault) cut(OpCode::kAllToAllSingle, bytes, given);
        if (all_ranks) given.result = cuts_input(code) ? here * (bytes / n) : bytes;
        return fault;
    }
    given.pieces = {{}};
    if (code == OpCode::kBroadcast) {
        given.result = bytes;
        const int root = op.root;
        if (host_of_[size_t(root)] == host_) {
            given.pieces = {{mine, bytes}};
            if (root == rank_ && bytes) std::memcpy(mine, in.data, bytes);
            local = part_of(OpCode::kBroadcast, op.deadline_ns, local_of_[size_t(root)]);
            local.extra = signed_as;
            return here == 1 ? Fault{} : near_->broadcast(local, {mine, bytes});
        }
    }
    local.extra = signed_as;
    return here == 1 ? Fault{} : near_->barrier(local);
}

// Cuts the data into a piece for each host: its ranks' parts of the sum, or what this host's ranks send to
// its ranks, sender by sender. `bytes`: of each rank's input.
void Fast::cut(OpCode code, size_t bytes, Given& given) {
    const size_t here = members().size(), part = bytes / host_of_.size();
    given.pieces.clear();
    given.result = here * part;
    if (code == OpCode::kReduceScatterSingle) {
        const char* from = mine_.get();
        for (const auto& ranks : hosts_) {
            given.pieces.push_back({from, ranks.size() * part});
            from += ranks.size() * part;
        }
        return;
    }
    given.result *= host_of_.size();
    if (!is_leader()) return;
    char* to = packed_.get();
    for (const auto& ranks : hosts_) {
        given.pieces.push_back({to, here * ranks.size() * part});
        for (size_t i = 0; i < here; ++i) {
            for (int r : ranks) {
                if (part) std::memcpy(to, mine_.get() + i * bytes + size_t(r) * part, part);
                to += part;
            }
        }
    }
}

const char* Fast::slot_of(int host, size_t bytes) const {
    return leaders_->slot_bytes(host) < kHead + bytes ? nullptr : leaders_->slot_data(host) + kHead;
}

// Makes the answer of all hosts' slots. False if one is too short.
bool Fast::combine(const Op& op, const Given& given) {
    const auto code = static_cast<OpCode>(op.code);
    char* const to = answer_.get() + kHead;
    if (folds_all_ranks(code, op.dtype, op.red)) return fold_all_ranks(op, given, to);
    if (reduces(code)) {
        std::vector<const void*> parts;
        for (int h = 0; h < int(hosts_.size()); ++h) {
            const char* part = slot_of(h, given.result);
            if (part == nullptr) return false;
            parts.push_back(part);
        }
        const int64_t count = int64_t(given.result) / dtype_bytes(op.dtype);
        const Red between = op.red == Red::kAvg ? Red::kSum : op.red;
        if (!fold(op.dtype, between, to, parts.data(), int(parts.size()), count, nullptr, int(parts.size())))
            return false;
        const void* total = to;
        return op.red != Red::kAvg || fold(op.dtype, Red::kAvg, to, &total, 1, count, nullptr, world());
    }
    if (code == OpCode::kAllGatherSingle || code == OpCode::kAllToAllSingle) {
        const size_t each = given.result / host_of_.size();  // of each rank
        char* at = to;
        for (size_t h = 0; h < hosts_.size(); ++h) {
            const size_t bytes = each * hosts_[h].size();
            const char* part = slot_of(int(h), bytes);
            if (part == nullptr) return false;
            if (bytes) std::memcpy(at, part, bytes);
            at += bytes;
        }
    } else if (code == OpCode::kBroadcast) {
        const char* part = slot_of(host_of_[size_t(op.root)], given.result);
        if (part == nullptr) return false;
        if (given.result) std::memcpy(to, part, given.result);
    }
    return true;
}

// The slot of each host has the values of its ranks: all, or for each of them those for this host's ranks.
bool Fast::fold_all_ranks(const Op& op, const Given& given, char* to) const {
    const size_t results = op.code == uint32_t(OpCode::kAllReduce) ? 1 : members().size();
    const size_t bytes = given.result / results;
    for (size_t i = 0; i < results; ++i) {
        std::vector<const void*> values;
        for (size_t r = 0; r < host_of_.size(); ++r) {
            const size_t host = size_t(host_of_[r]);
            const char* slot = slot_of(int(host), hosts_[host].size() * results * bytes);
            if (slot == nullptr) return false;
            values.push_back(slot + (size_t(local_of_[r]) * results + i) * bytes);
        }
        if (!fold(op.dtype, op.red, to + i * bytes, values.data(), world(),
                  int64_t(bytes) / dtype_bytes(op.dtype), nullptr, world())) {
            return false;
        }
    }
    return true;
}

// Copies the answer to where this rank wants it.
void Fast::deliver(const Op& op, const Tensor& in, const Tensor& out) const {
    const auto code = static_cast<OpCode>(op.code);
    const char* at = answer_.get() + kHead;
    char* const to = static_cast<char*>(out.data);
    const size_t bytes = size_t(out.bytes), here = members().size();
    if (bytes == 0) return;
    if (code == OpCode::kAllReduce || code == OpCode::kBroadcast) {
        if (op.root != rank_) std::memcpy(to, at, bytes);
    } else if (code == OpCode::kReduceScatterSingle) {
        std::memcpy(to, at + size_t(local_) * bytes, bytes);
    } else if (code == OpCode::kAllGatherSingle || code == OpCode::kAllToAllSingle) {
        // For each rank, in the order of hosts, its input; or what it sends to this host's ranks.
        const bool gathers = code == OpCode::kAllGatherSingle;
        const size_t part = gathers ? size_t(in.bytes) : size_t(in.bytes) / host_of_.size();
        for (const auto& ranks : hosts_) {
            for (int r : ranks) {
                std::memcpy(to + size_t(r) * part, at + (gathers ? 0 : size_t(local_) * part), part);
                at += gathers ? part : here * part;
            }
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
