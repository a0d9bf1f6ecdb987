// Collectives of which each column carries a part between the hosts.
//
// They begin with a step within the hosts, in which their ranks compare what they call, and go on with one
// within the columns. A rank that has found a difference in its host tells its column, so all ranks know of
// it after these two. Until then nothing of the user's is written. Large data take these steps in chunks.
#include <algorithm>
#include <cstring>
#include <utility>

#include "hosts/fast.hpp"
#include "hosts/parts.hpp"
#include "reduce/wire.hpp"

namespace unicomm::hosts {
namespace {

constexpr size_t kLine = 64;
// Bytes of a host's data that need not be divided among columns: that takes another step within the hosts.
constexpr size_t kMostWhole = 4096;
constexpr size_t kBroadcastSlices = 4;  // the general path has fewer steps
// Among more hosts, the parts of a slice that each rank reduces are small messages.
constexpr size_t kHostsOfSlices = 8;
// Bytes that a rank has to send less for a second step within the columns.
constexpr size_t kWorthAStep = 1 << 16;

using shm::Buffer;
using shm::Op;

size_t whole_lines(size_t bytes) { return bytes / kLine * kLine; }

std::vector<Buffer> in_lines(char* data, size_t bytes, size_t count) {
    const size_t most = whole_lines(bytes / count + (bytes % count != 0) + kLine - 1);
    std::vector<Buffer> out;
    for (size_t i = 0; i < count; ++i) {
        const size_t begin = std::min(i * most, bytes);
        out.push_back({data + begin, std::min(most, bytes - begin)});
    }
    return out;
}

// Bytes of what is carried for one byte of the tensor.
size_t width(Carried how, DType dtype) {
    return how == Carried::kWide ? sizeof(float) / size_t(dtype_bytes(dtype)) : 1;
}

// Cuts what a rank gives for its share as `share` is cut.
void cut_like(std::vector<transport::Piece>& pieces, const std::vector<Buffer>& share, size_t width) {
    const char* const values = std::exchange(pieces, {})[0].data;
    for (const Buffer& part : share) {
        pieces.push_back({values + size_t(part.data - share[0].data) * width, part.bytes * width});
    }
}

}  // namespace

// The shares of a host's ranks in a tensor.
std::vector<Buffer> Fast::shares(char* data, size_t bytes) const { return in_lines(data, bytes, largest_); }

// What a slice is of the parts of a host's ranks, in a tensor with a part of `stride` bytes for each rank.
std::vector<Buffer> Fast::parts(int host, char* data, size_t stride, Slice slice) const {
    std::vector<Buffer> out;
    for (int r : hosts_[size_t(host)]) {
        out.push_back({data + size_t(r) * stride + slice.begin, slice.bytes});
    }
    return out;
}

// The bytes that are cut into slices: of the tensor, or of each rank's part.
size_t Fast::sliced(OpCode code, size_t bytes) const {
    return shm::cuts_input(code) ? bytes / host_of_.size() : bytes;
}

Carried Fast::carried(OpCode code, DType dtype, Red red, size_t bytes) const {
    if (!folds_all_ranks(code, dtype, red)) return Carried::kPartial;
    const bool few = sliced(code, bytes) <= most_of_slice(code, Carried::kAllRanks);
    return few || red == Red::kProduct || !convert_defined(dtype) ? Carried::kAllRanks : Carried::kWide;
}

// The largest slice.
size_t Fast::most_of_slice(OpCode code, Carried carried) const {
    const size_t copies = code == OpCode::kAllToAllSingle || carried == Carried::kAllRanks ? largest_
                          : carried == Carried::kWide                                      ? 2
                                                                                           : 1;
    return whole_lines(most_for_each_ / copies) * (code == OpCode::kAllReduce ? largest_ : 1);
}

// Whether each column carries a part of a collective.
bool Fast::divides(OpCode code, DType dtype, Red red, size_t bytes) const {
    if (!even_) return false;
    const Carried how = carried(code, dtype, red, bytes);
    const size_t n = sliced(code, bytes), most = most_of_slice(code, how);
    switch (code) {
        case OpCode::kBroadcast:
            return n > kMostWhole && n <= kBroadcastSlices * most;
        case OpCode::kAllGatherSingle:
            return largest_ * n > kMostWhole;
        case OpCode::kAllToAllSingle:  // more goes straight from rank to rank
            return largest_ * largest_ * n > kMostWhole && n <= most;
        case OpCode::kAllReduce:
        case OpCode::kReduceScatterSingle:
            if (how == Carried::kAllRanks) return largest_ * bytes > kMostWhole && n <= most;
            return bytes > kMostWhole &&
                   (code != OpCode::kAllReduce || n <= most || hosts_.size() <= kHostsOfSlices);
        default:
            return false;
    }
}

Fault Fast::divided(const Op& op, const Tensor& in, const Tensor& out, uint64_t signed_as) {
    const auto code = static_cast<OpCode>(op.code);
    const size_t bytes = sliced(code, size_t(in.bytes));
    const Carried how = carried(code, op.dtype, op.red, size_t(in.bytes));
    const size_t most = most_of_slice(code, how);
    failed_in_ = Part::kNone;
    for (Slice slice; slice.begin < bytes; slice.begin += most) {
        slice.bytes = std::min(most, bytes - slice.begin);
        Given given;
        bool alike = true, good = false;
        if (Fault fault = divide(op, in, slice, signed_as, given)) {
            alike = fault.code != FaultCode::kMismatch;
            if (alike) return in_part(Part::kNear, std::move(fault));
        }
        std::vector<Buffer> share;  // of an all-reduce: this rank's, one part or one for each host
        if (code == OpCode::kAllReduce) {
            const Buffer whole =
                shares(static_cast<char*>(out.data) + slice.begin, slice.bytes)[size_t(local_)];
            share = in_lines(whole.data, whole.bytes, cuts_share(how, whole.bytes) ? hosts_.size() : 1);
            if (alike && share.size() > 1) cut_like(given.pieces, share, width(how, op.dtype));
        }
        if (Fault fault = swap(signed_as, given, alike, op.deadline_ns, good)) return fault;
        if (!good) return {FaultCode::kMismatch, {}, {}, {}};
        if (code == OpCode::kAllReduce) {
            if (Fault fault = reduce_share(op, how, share, signed_as)) return fault;
        }
        if (Fault fault = join(op, in, out, slice)) return in_part(Part::kLate, std::move(fault));
    }
    return {};
}

// Whether each rank of a column reduces a part of the share that all of them have: that takes another step.
bool Fast::cuts_share(Carried how, size_t bytes) const {
    const size_t n = hosts_.size();
    return how != Carried::kAllRanks && (n - 1) * (n - 2) * bytes / n >= kWorthAStep;
}

// Makes this rank's share of an all-reduce: all of it, or one of its parts, and gets the others from its
// column.
Fault Fast::reduce_share(const Op& op, Carried how, const std::vector<Buffer>& share, uint64_t signed_as) {
    const bool whole = share.size() == 1;
    const Buffer mine = share[whole ? 0 : size_t(host_)];
    if (!fold_column(op, how, mine)) return in_part(Part::kFar, odd_slot());
    if (whole) return {};
    Given given;
    given.pieces = {{mine.data, mine.bytes}};
    bool good = false;
    if (Fault fault = swap(signed_as, given, true, op.deadline_ns, good)) return fault;
    for (int h = 0; h < int(hosts_.size()); ++h) {
        const Buffer& part = share[size_t(h)];
        if (h == host_ || part.bytes == 0) continue;
        const char* const from = slot_of(h, part.bytes);
        if (from == nullptr) return in_part(Part::kFar, odd_slot());
        std::memcpy(part.data, from, part.bytes);
    }
    return {};
}

// The step within the host. This rank gets what its column is to carry.
Fault Fast::divide(const Op& op, const Tensor& in, Slice slice, uint64_t signed_as, Given& given) {
    const auto code = static_cast<OpCode>(op.code);
    const size_t part = size_t(in.bytes) / host_of_.size();
    const Carried how = carried(code, op.dtype, op.red, size_t(in.bytes));
    char* const data = static_cast<char*>(in.data);
    char *at = mine_.get(), *sums = packed_.get();
    Op local = part_of(OpCode::kBarrier, op.deadline_ns);
    local.extra = signed_as;
    std::lock_guard lock(near_->running());
    // Each rank of the host gets its one of the `buffers` of all of them, or the reduction of these.
    auto exchange = [&](const std::vector<Buffer>& buffers, bool reduced) {
        const size_t mine = buffers[size_t(local_)].bytes, count = reduced ? 1 : largest_;
        std::vector<Buffer> to;
        for (size_t i = 0; i < count; ++i) to.push_back({at + i * mine, mine});
        local.code = uint32_t(reduced ? OpCode::kReduceScatterV : OpCode::kAllToAllSingle);
        local.dtype = reduced ? op.dtype : DType::kUInt8;
        if (reduced) local.red = op.red == Red::kAvg ? Red::kSum : op.red;
        Fault fault = reduced ? near_->reduce_scatter(local, buffers, to[0])
                              : near_->all_to_all(local, buffers, to, false);
        if (how != Carried::kWide) {
            given.pieces.push_back({at, count * mine});
            at += count * mine;
        } else if (!fault) {
            const int64_t n = int64_t(mine) / dtype_bytes(op.dtype);
            for (const Buffer& values : to) {
                convert(op.dtype, &values == to.data() ? Conversion::kWiden : Conversion::kAdd, values.data,
                        sums, n);
            }
            given.pieces.push_back({sums, size_t(n) * sizeof(float)});
            sums += size_t(n) * sizeof(float);
        }
        return fault;
    };
    Buffer share;
    switch (code) {
        case OpCode::kBroadcast:
            given.pieces = {{}};
            if (host_of_[size_t(op.root)] != host_) return near_->barrier(local);
            if (op.root == rank_) std::memcpy(at, data + slice.begin, slice.bytes);
            share = shares(at, slice.bytes)[size_t(local_)];
            given.pieces = {{share.data, share.bytes}};
            local.code = op.code;
            local.dtype = DType::kUInt8;
            local.root = local_of_[size_t(op.root)];
            return near_->broadcast(local, {at, slice.bytes});
        case OpCode::kAllGatherSingle:
            given.pieces = {{data + slice.begin, slice.bytes}};
            return near_->barrier(local);
        case OpCode::kAllReduce:
            return exchange(shares(data + slice.begin, slice.bytes), how == Carried::kPartial);
        default:  // a part for each rank
            for (int h = 0; h < int(hosts_.size()); ++h) {
                if (h == host_ && code == OpCode::kAllToAllSingle) {
                    given.pieces.push_back({});  // stays in the host: see `join`
                } else if (Fault fault = exchange(parts(h, data, part, slice),
                                                  shm::reduces(code) && how == Carried::kPartial)) {
                    return fault;
                }
            }
            return {};
    }
}

// Makes the result of what the column has brought, for most with another step within the host.
Fault Fast::join(const Op& op, const Tensor& in, const Tensor& out, Slice slice) {
    const auto code = static_cast<OpCode>(op.code);
    const size_t bytes = size_t(in.bytes), part = bytes / host_of_.size();
    const Carried how = carried(code, op.dtype, op.red, bytes);
    char* const data = static_cast<char*>(in.data);
    char* const to = static_cast<char*>(out.data);
    Op local = part_of(OpCode::kAllGatherV, later(op.deadline_ns, for_others_));
    std::lock_guard lock(near_->running());
    switch (code) {
        case OpCode::kBroadcast: {
            const int home = host_of_[size_t(op.root)];
            if (home == host_) {
                if (op.root != rank_) std::memcpy(to + slice.begin, mine_.get(), slice.bytes);
                return {};
            }
            const auto places = shares(to + slice.begin, slice.bytes);
            const size_t mine = places[size_t(local_)].bytes;
            char* const share = slot_of(home, mine);
            return share ? near_->all_gather(local, {share, mine}, places) : odd_slot();
        }
        case OpCode::kAllGatherSingle:
            for (int h = 0; h < int(hosts_.size()); ++h) {
                char* const mine = h == host_ ? data + slice.begin : slot_of(h, slice.bytes);
                if (mine == nullptr) return odd_slot();
                Fault fault = near_->all_gather(local, {mine, slice.bytes}, parts(h, to, bytes, slice));
                if (fault) return fault;
            }
            return {};
        case OpCode::kAllReduce: {
            const auto places = shares(to + slice.begin, slice.bytes);
            return near_->all_gather(local, places[size_t(local_)], places);
        }
        case OpCode::kReduceScatterSingle:
            return fold_column(op, how, {to + slice.begin, slice.bytes}) ? Fault{} : odd_slot();
        default:  // kAllToAllSingle
            for (int h = 0; h < int(hosts_.size()); ++h) {
                if (h == host_) continue;
                const char* from = slot_of(h, largest_ * slice.bytes);
                if (from == nullptr) return odd_slot();
                for (const Buffer& place : parts(h, to, part, slice)) {
                    std::memcpy(place.data, from, place.bytes);
                    from += place.bytes;
                }
            }
            local.code = op.code;
            return near_->all_to_all(local, parts(host_, data, part, slice), parts(host_, to, part, slice),
                                     false);
    }
}

// Makes this rank's share of a reduction. False if a slot is too short.
bool Fast::fold_column(const Op& op, Carried how, Buffer to) {
    if (how != Carried::kWide) return fold_slots(op, to, 1, 0);
    const int64_t count = int64_t(to.bytes) / dtype_bytes(op.dtype);
    Op wide = op;
    wide.dtype = DType::kFloat32;
    const Buffer sum{mine_.get(), size_t(count) * sizeof(float)};
    if (!fold_slots(wide, sum, 1, 0)) return false;
    convert(op.dtype, Conversion::kRound, sum.data, to.data, count);
    return true;
}

}  // namespace unicomm::hosts
