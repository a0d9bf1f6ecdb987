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
// Messages that all ranks of a host send in a step. More take longer than another step within the host.
constexpr size_t kMostMessages = 64;

}  // namespace

uint64_t signature(uint32_t op, uint32_t dtype, uint32_t how, int root, uint64_t count, uint64_t extra) {
    uint64_t hash = mix(0, op);
    for (uint64_t value : {uint64_t(dtype), uint64_t(how), uint64_t(uint32_t(root)), count, extra}) {
        hash = mix(hash, value);
    }
    return hash;
}

Fast::Fast(nb::object near, nb::object far, std::vector<std::vector<int>> hosts, int rank, bool crowded,
           double slack, double for_others, nb::handle supervisor)
    : SupervisedOperations(supervisor),
      near_object_(std::move(near)),
      far_object_(std::move(far)),
      near_(&nb::cast<shm::Group&>(near_object_)),
      far_(nb::cast<transport::Fast&>(far_object_)),
      hosts_(std::move(hosts)),
      most_(transport::Slots::most_of_host(int(hosts_.size()))),
      most_for_each_(transport::Slots::most_of_host_for_each(int(hosts_.size()))),
      rank_(rank),
      slack_(slack),
      for_others_(for_others),
      host_of_(size_t(far_.world())),
      local_of_(size_t(far_.world())),
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
    mine_ = std::make_unique_for_overwrite<char[]>(most_for_each_ * std::max(hosts_.size(), largest_));
    for (const auto& ranks : hosts_) even_ = even_ && ranks.size() == largest_;
    by_columns_ = even_ && !crowded && largest_ * (hosts_.size() - 1) <= kMostMessages;
    if (even_ || is_leader()) {
        std::vector<int> members;
        for (const auto& ranks : hosts_) members.push_back(ranks.at(size_t(local_)));
        column_ = far_.slots_of(std::move(members), kHead + most_for_each_);
    }
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
    if (divides(code, dtype, red, bytes)) return true;
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
    if (near_ == nullptr || !far_.usable()) return false;
    if (!fits(static_cast<OpCode>(op.code), op.dtype, op.red, size_t(in.bytes))) return false;
    enter(op, size_t(in.bytes));
    return true;
}

// All ranks count the collectives between hosts, those as well that have no part in one. With the GIL.
void Fast::enter(const Op& op, size_t bytes) {
    const bool parted = divides(static_cast<OpCode>(op.code), op.dtype, op.red, bytes);
    parted || swaps() ? far_.begin_part() : far_.pass_part();
}

Fault Fast::run_alone(const Op& op, const Tensor& in, const Tensor& out) {
    {
        nb::gil_scoped_acquire gil;
        enter(op, size_t(in.bytes));
    }
    return collective(op, in, out);
}

Fault Fast::collective(const Op& op, const Tensor& in, const Tensor& out) {
    far_.counts().begin_whole(op.code);
    Fault fault = stepped(op, in, out);
    if (!fault || fault.code == FaultCode::kMismatch) over();
    return fault;
}

Fault Fast::stepped(const Op& op, const Tensor& in, const Tensor& out) {
    const auto code = static_cast<OpCode>(op.code);
    const uint64_t signed_as =
        signature(op.code, uint32_t(op.dtype), uint32_t(op.red), op.root, op.count, op.extra);
    const bool parted = divides(code, op.dtype, op.red, size_t(in.bytes));
    const bool straight = !parted && code == OpCode::kAllToAllSingle && !goes_by_leaders(size_t(in.bytes));
    Fault fault = parted
                      ? divided(op, in, out, signed_as)
                      : first_step(straight ? part_of(OpCode::kBarrier, op.deadline_ns) : op, in, signed_as);
    if (fault.code == FaultCode::kMismatch) {
        // All ranks are in step, and learn from each other what they called.
        ask("explain", op.code, uint32_t(op.dtype), uint32_t(op.red), op.root, op.count, op.extra);
    } else if (!fault && straight) {
        return go_straight(op, in, out, signed_as);
    } else if (!fault && !parted) {
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
        const Slice whole{0, part};
        std::lock_guard lock(near_->running());
        Fault fault = near_->all_to_all(local, parts(host_, static_cast<char*>(in.data), part, whole),
                                        parts(host_, static_cast<char*>(out.data), part, whole), false);
        if (fault) return in_part(Part::kNear, std::move(fault));
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
    const Op op = part_of(OpCode::kBarrier, deadline_ns);
    {
        nb::gil_scoped_acquire gil;
        enter(op, 0);
    }
    return first_step(op, {}, signed_as);
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
    if (swaps()) {
        if (Fault fault = swap(signed_as, given, alike, op.deadline_ns, good)) return fault;
        if (good && !combine(op, given)) return in_part(Part::kFar, odd_slot());
        answer_[0] = good;
    }
    if (alike && members().size() > 1 && !by_columns_) {
        std::lock_guard lock(near_->running());
        Fault fault = near_->broadcast(part_of(OpCode::kBroadcast, later(op.deadline_ns, for_others_), 0),
                                       {answer_.get(), kHead + given.result});
        if (fault) return in_part(Part::kLate, std::move(fault));
        good = answer_[0] != 0;
    }
    if (good) return {};
    if (!swaps() && column_) {  // whose ranks may have called what goes by columns
        if (Fault fault = swap(signed_as, given, false, op.deadline_ns, good)) return fault;
    }
    return {FaultCode::kMismatch, {}, {}, {}};
}

Fault Fast::swap_bytes(std::string_view mine, uint64_t deadline_ns, std::vector<std::string>& all) {
    Fault fault = far_.swap_slots(*column_, {}, {{mine.data(), mine.size()}}, deadline_ns);
    for (int h = 0; h < int(hosts_.size()) && !fault; ++h) {
        all.emplace_back(column_->data(h), column_->bytes(h));
    }
    return in_part(Part::kFar, std::move(fault));
}

// Exchanges what this rank calls, and its `given`, with its column. `alike`: whether its host's ranks call
// the same; `good`: whether all ranks do of whom this rank knows.
Fault Fast::swap(uint64_t signed_as, const Given& given, bool alike, uint64_t deadline_ns, bool& good) {
    const uint64_t head[kHead / sizeof(uint64_t)] = {signed_as, alike};
    Fault fault =
        far_.swap_slots(*column_, {reinterpret_cast<const char*>(head), kHead},
                        alike ? given.pieces : std::vector<transport::Piece>(1), later(deadline_ns, slack_));
    if (fault) return in_part(Part::kFar, std::move(fault));
    good = alike;
    for (int h = 0; h < int(hosts_.size()); ++h) {
        good &= slot_of(h, 0) != nullptr && std::memcmp(column_->data(h), head, kHead) == 0;
    }
    return {};
}

// The ranks of the host compare what they call, and those that exchange slots get its data.
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
        local = by_columns_ ? part_of(OpCode::kAllReduce, op.deadline_ns)
                            : part_of(OpCode::kReduce, op.deadline_ns, 0);
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
        return near_->all_reduce(local, values, swaps() ? mine : nullptr, uint64_t(in.numel));
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
    if (!swaps()) return;
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

char* Fast::slot_of(int host, size_t bytes) const {
    return column_->bytes(host) < kHead + bytes ? nullptr : column_->room_of(host) + kHead;
}

// Makes the answer of all hosts' slots. False if one is too short.
bool Fast::combine(const Op& op, const Given& given) {
    const auto code = static_cast<OpCode>(op.code);
    char* const to = answer_.get() + kHead;
    if (folds_all_ranks(code, op.dtype, op.red)) {  // all, or for each of them those for this host's ranks
        const size_t results = code == OpCode::kAllReduce ? 1 : members().size();
        const size_t bytes = given.result / results;
        for (size_t i = 0; i < results; ++i) {
            if (!fold_slots(op, {to + i * bytes, bytes}, results, i)) return false;
        }
        return true;
    }
    if (reduces(code)) return fold_slots(op, {to, given.result}, 1, 0);
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

// Folds the i-th of the results of which each slot has its host's partial ones, or the values of the host's
// ranks, one rank after the other. False if a slot is too short.
bool Fast::fold_slots(const Op& op, Buffer to, size_t results, size_t i) const {
    const bool all_ranks = folds_all_ranks(static_cast<OpCode>(op.code), op.dtype, op.red);
    std::vector<const void*> values;
    for (int v = 0; v < (all_ranks ? world() : int(hosts_.size())); ++v) {
        const int host = all_ranks ? host_of_[size_t(v)] : v;
        const char* slot = slot_of(host, (all_ranks ? hosts_[size_t(host)].size() : 1) * results * to.bytes);
        if (slot == nullptr) return false;
        values.push_back(slot + (size_t(all_ranks ? local_of_[size_t(v)] : 0) * results + i) * to.bytes);
    }
    const int64_t count = int64_t(to.bytes) / dtype_bytes(op.dtype);
    const Red between = op.red == Red::kAvg && !all_ranks ? Red::kSum : op.red;
    const int n = int(values.size());
    if (!fold(op.dtype, between, to.data, values.data(), n, count, nullptr, n)) return false;
    const void* total = to.data;
    return between == op.red || fold(op.dtype, Red::kAvg, to.data, &total, 1, count, nullptr, world());
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
    if (near != 0 && near != messages.size()) return false;
    return far_.begins(messages);  // which counts those within the host as well
}

Fault Fast::exchange(const std::vector<shm::Message>& messages, uint64_t deadline_ns) {
    failed_in_ = Part::kNone;
    if (host_of_[size_t(messages[0].peer)] != host_) {
        return in_part(Part::kFar, far_.exchange(messages, deadline_ns));
    }
    std::vector<shm::Message> local = messages;
    for (shm::Message& m : local) m.peer = local_of_[size_t(m.peer)];
    std::lock_guard lock(near_->running());
    awaits_near_ = true;
    Fault fault = near_->exchange(local, deadline_ns);
    if (!fault) over();
    return in_part(Part::kNear, std::move(fault));
}

std::vector<transport::Fast::Awaited> Fast::awaited_near() const {
    return awaits_near_ ? far_.awaited() : std::vector<transport::Fast::Awaited>{};
}

void Fast::over() {
    awaits_near_ = false;
    far_.counts().inside = 0;
}

}  // namespace unicomm::hosts
