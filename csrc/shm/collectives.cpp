// The collectives of a Group, in the rounds that group.hpp describes.
#include <algorithm>
#include <cstring>

#include "shm/group.hpp"

namespace unicomm::shm {
namespace {

constexpr uint64_t kInline = sizeof(Announcement::inline_data);
constexpr uint64_t kPiece = 64 * 1024;  // the smallest of a broadcast that is divided
// A broadcast between two ranks writes its result past the caches if both tensors would fill more than this
// share of the last one, as tensors and slots then evict each other.
constexpr double kShareOfTwo = 0.7;
constexpr uint64_t kOneShotBytes = 64 * 1024;  // larger all-reduces divide the reduction among the ranks

// The part of a buffer that is sent in the n-th round.
Buffer part(Buffer stream, uint64_t n, uint64_t room) {
    uint64_t begin = std::min(n * room, stream.bytes);
    return {stream.data + begin, std::min(room, stream.bytes - begin)};
}

void copy(char* to, const char* from, uint64_t bytes) {
    simulation::point("copy");
    if (bytes != 0 && to != from) std::memmove(to, from, bytes);
}

uint64_t bytes_of(const std::vector<Buffer>& buffers) {
    uint64_t bytes = 0;
    for (const Buffer& b : buffers) bytes += b.bytes;
    return bytes;
}

uint64_t rounds_for(uint64_t longest, uint64_t room) {
    return std::max<uint64_t>(1, (longest + room - 1) / room);
}

}  // namespace

void Group::alone(const Op& op, Buffer in, Buffer out) {
    if (op.red == Red::kNone) return copy(out.data, in.data, out.bytes);
    const void* source = in.data;
    int64_t count = int64_t(out.bytes / uint64_t(dtype_bytes(op.dtype)));
    fold(op.dtype, op.red, out.data, &source, 1, count, &op.factor, 1);
}

Fault Group::barrier(const Op& op) {
    if (Fault f = next_round(op)) return f;
    return first_round(op, 0);
}

Fault Group::broadcast(const Op& op, Buffer buffer) {
    uint64_t room = segment_->layout().slot_bytes;
    // Two ranks: the root fills a piece while the other reads the one before. More ranks lose more by the
    // waits than they gain.
    if (world_ == 2 && buffer.bytes >= 2 * kPiece) {
        room = std::min(room, std::max(kPiece, std::min(buffer.bytes / 8, room / 2)) / 4096 * 4096);
    }
    uint64_t span = std::min(room, buffer.bytes);
    bool in_line = buffer.bytes <= kInline;
    bool root = rank_ == op.root;
    const ResultCopy result(world_, buffer.bytes, world_ == 2 ? kShareOfTwo : 1);
    for (uint64_t n = 0, rounds = rounds_for(buffer.bytes, room); n < rounds; ++n) {
        Buffer now = part(buffer, n, room);
        auto stage = [&] {
            if (root) stager_.copy(staging(in_line, span), now.data, now.bytes);
        };
        bool direct = false;
        const char* mine = root ? offerable(buffer.data, buffer.bytes) : nullptr;
        if (Fault f = begin_round(op, n, buffer.bytes, mine, 1, direct, stage)) return f;
        if (direct) {
            if (root) return leave(op, -1);
            if (Fault f = copy_offer(op.root, 0, buffer, result)) return f;
            return leave(op, rank_);
        }
        if (n > 0) {
            if (Fault f = await_round(op, round_, op.root)) return f;
        }
        if (!root) result.copy(now.data, staged(op.root, in_line, span), now.bytes);
    }
    return {};
}

Fault Group::copy_offer(int rank, uint64_t offset, Buffer to, const ResultCopy& result) {
    const char* theirs = nullptr;
    if (Fault f = locate(rank, offset, to.bytes, theirs)) return f;
    result.copy(to.data, theirs, to.bytes);
    return {};
}

void Group::learn_factors(const Op& op) {
    if (op.red != Red::kPremulSum) return;
    for (int r = 0; r < world_; ++r) factors_[size_t(r)] = segment_->announcement(r, round_).factor;
}

Fault Group::all_reduce(const Op& op, const char* in, char* out, uint64_t count) {
    uint64_t bytes = count * uint64_t(dtype_bytes(op.dtype));
    // With two ranks, one shot moves as many bytes as two shots, with half as many waits.
    bool small = bytes <= std::min(kOneShotBytes, uint64_t(segment_->layout().slot_bytes));
    return small || world_ == 2 ? one_shot(op, in, out, count) : two_shot(op, in, out, count);
}

// Publishes the staged chunk and waits for those of all ranks.
Fault Group::share_chunk(const Op& op, bool first, uint64_t bytes) {
    if (!first) {
        publish(op, bytes);
        return await_all(op);
    }
    if (Fault f = first_round(op, bytes)) return f;
    learn_factors(op);
    return {};
}

// Every rank reads and reduces everything: one round per chunk.
Fault Group::one_shot(const Op& op, const char* in, char* out, uint64_t count) {
    uint64_t size = uint64_t(dtype_bytes(op.dtype));
    bool in_line = count * size <= kInline;
    uint64_t chunk = segment_->layout().slot_bytes / size, span = count * size;
    std::vector<const void*> sources(static_cast<size_t>(world_));
    for (uint64_t begin = 0; begin == 0 || begin < count; begin += chunk) {
        uint64_t len = std::min(chunk, count - begin);
        const char* source = in + begin * size;
        if (Fault f = next_round(op)) return f;
        stager_.copy(staging(in_line, span), source, len * size);
        if (Fault f = share_chunk(op, begin == 0, count * size)) return f;
        if (!out || len == 0) continue;
        for (int r = 0; r < world_; ++r) sources[size_t(r)] = r == rank_ ? source : staged(r, in_line, span);
        fold(op.dtype, op.red, out + begin * size, sources.data(), world_, int64_t(len), factors_.data(),
             world_);
    }
    return {};
}

// Two rounds per chunk: every rank reduces its share of the chunk, then collects the shares of the others.
Fault Group::two_shot(const Op& op, const char* in, char* out, uint64_t count) {
    uint64_t size = uint64_t(dtype_bytes(op.dtype));
    uint64_t n = uint64_t(world_);
    uint64_t per_line = uint64_t(kLine) / size;
    uint64_t chunk = segment_->layout().slot_bytes / size;
    std::vector<const void*> sources(static_cast<size_t>(world_));
    for (uint64_t begin = 0; begin < count; begin += chunk) {
        uint64_t len = std::min(chunk, count - begin);
        uint64_t share = ((len + n - 1) / n + per_line - 1) / per_line * per_line;
        auto from = [&](int r) { return std::min(uint64_t(r) * share, len); };
        auto elements = [&](int r) { return from(r + 1) - from(r); };
        const char* source = in + begin * size;

        if (Fault f = next_round(op)) return f;
        char* slot = staging(false);
        // The own share is read in place: no other rank needs it.
        stager_.copy(slot, source, from(rank_) * size);
        stager_.copy(slot + from(rank_ + 1) * size, source + from(rank_ + 1) * size,
                     (len - from(rank_ + 1)) * size);
        if (Fault f = share_chunk(op, begin == 0, count * size)) return f;
        uint64_t mine = from(rank_) * size;
        for (int r = 0; r < world_; ++r) {
            sources[size_t(r)] = (r == rank_ ? source : staged(r, false)) + mine;
        }
        // All others have entered this round, so they have read this rank's slot of the round before: the
        // slot of the next round is free.
        char* shared = segment_->slot(rank_, round_ + 1);
        char* result = out ? out + begin * size + mine : shared;
        fold(op.dtype, op.red, result, sources.data(), world_, int64_t(elements(rank_)), factors_.data(),
             world_);
        if (out) stager_.copy(shared, result, elements(rank_) * size);
        if (Fault f = next_round(op)) return f;
        publish(op, count * size);
        if (out) {
            // Starts at the next rank, so that not all ranks read the same slot at once.
            for (int i = 1; i < world_; ++i) {
                int r = (rank_ + i) % world_;
                if (Fault f = await_round(op, round_, r)) return f;
                copy(out + (begin + from(r)) * size, staged(r, false), elements(r) * size);
            }
        }
    }
    return {};
}

Fault Group::all_gather(const Op& op, Buffer in, const std::vector<Buffer>& outs) {
    uint64_t room = segment_->layout().slot_bytes;
    uint64_t longest = 0;
    for (const Buffer& p : outs) longest = std::max(longest, p.bytes);
    bool in_line = longest <= kInline;
    ResultCopy result(world_, in.bytes + bytes_of(outs));
    for (uint64_t n = 0, rounds = rounds_for(longest, room); n < rounds; ++n) {
        Buffer now = part(in, n, room);
        auto stage = [&] { stager_.copy(staging(in_line, longest), now.data, now.bytes); };
        bool direct = false;
        const char* mine = offerable(in.data, in.bytes);
        if (Fault f = begin_round(op, n, longest, mine, world_, direct, stage)) return f;
        if (n == 0) result.copy(outs[size_t(rank_)].data, in.data, in.bytes);
        for (int i = 1; i < world_; ++i) {
            int r = (rank_ + i) % world_;
            if (direct) {
                if (Fault f = copy_offer(r, 0, outs[size_t(r)], result)) return f;
                continue;
            }
            Buffer to = part(outs[size_t(r)], n, room);
            if (to.bytes == 0) continue;
            if (Fault f = await_round(op, round_, r)) return f;
            result.copy(to.data, staged(r, in_line, longest), to.bytes);
        }
        if (direct) return leave(op, -1);
    }
    return {};
}

Fault Group::gather(const Op& op, Buffer in, const std::vector<Buffer>& outs) {
    uint64_t room = segment_->layout().slot_bytes;
    bool in_line = in.bytes <= kInline;
    for (uint64_t n = 0, rounds = rounds_for(in.bytes, room); n < rounds; ++n) {
        Buffer now = part(in, n, room);
        auto stage = [&] {
            if (rank_ != op.root) stager_.copy(staging(in_line), now.data, now.bytes);
        };
        bool direct = false;
        const char* mine = rank_ == op.root ? nullptr : offerable(in.data, in.bytes);
        if (Fault f = begin_round(op, n, in.bytes, mine, world_ - 1, direct, stage)) return f;
        if (rank_ != op.root) {
            if (direct) return leave(op, op.root);
            continue;
        }
        if (n == 0) copy(outs[size_t(rank_)].data, in.data, in.bytes);
        for (int r = 0; r < world_; ++r) {
            if (r == rank_) continue;
            if (direct) {
                if (Fault f = copy_offer(r, 0, outs[size_t(r)], {})) return f;
                continue;
            }
            if (Fault f = await_round(op, round_, r)) return f;
            Buffer to = part(outs[size_t(r)], n, room);
            copy(to.data, staged(r, in_line), to.bytes);
        }
        if (direct) return leave(op, rank_);
    }
    return {};
}

Fault Group::scatter(const Op& op, const std::vector<Buffer>& ins, Buffer out) {
    uint64_t room = segment_->layout().slot_bytes / uint64_t(world_) / kLine * kLine;
    for (uint64_t n = 0, rounds = rounds_for(out.bytes, room); n < rounds; ++n) {
        auto stage = [&] {
            if (rank_ == op.root) stage_parts(ins, n, room);
        };
        bool direct = false;
        const char* mine = rank_ == op.root ? offerable(ins) : nullptr;
        if (Fault f = begin_round(op, n, out.bytes, mine, 1, direct, stage)) return f;
        if (rank_ == op.root && n == 0) copy(out.data, ins[size_t(rank_)].data, out.bytes);
        if (direct) {
            if (rank_ == op.root) return leave(op, -1);
            if (Fault f = copy_offer(op.root, uint64_t(rank_) * out.bytes, out, {})) return f;
            return leave(op, rank_);
        }
        if (n > 0) {
            if (Fault f = await_round(op, round_, op.root)) return f;
        }
        if (rank_ != op.root) {
            Buffer to = part(out, n, room);
            copy(to.data, staged(op.root, false) + uint64_t(rank_) * room, to.bytes);
        }
    }
    return {};
}

Fault Group::reduce_offered(const Op& op, const std::vector<Buffer>& ins, Buffer out) {
    std::vector<const void*> sources(static_cast<size_t>(world_));
    uint64_t offset = uint64_t(ins[size_t(rank_)].data - ins[0].data);
    for (int r = 0; r < world_; ++r) {
        const char* data = ins[size_t(rank_)].data;
        if (r != rank_ && out.bytes > 0) {  // an empty part has no address, and so no offset
            if (Fault f = locate(r, offset, out.bytes, data)) return f;
        }
        sources[size_t(r)] = data;
    }
    int64_t count = int64_t(out.bytes / uint64_t(dtype_bytes(op.dtype)));
    fold(op.dtype, op.red, out.data, sources.data(), world_, count, factors_.data(), world_);
    return leave(op, -1);
}

// Stages a part for each of the other ranks.
void Group::stage_parts(const std::vector<Buffer>& ins, uint64_t n, uint64_t room) {
    for (int r = 0; r < world_; ++r) {
        if (r == rank_) continue;
        Buffer now = part(ins[size_t(r)], n, room);
        stager_.copy(staging(false) + uint64_t(r) * room, now.data, now.bytes);
    }
}

Fault Group::reduce_scatter(const Op& op, const std::vector<Buffer>& ins, Buffer out) {
    uint64_t size = uint64_t(dtype_bytes(op.dtype));
    uint64_t room = segment_->layout().slot_bytes / uint64_t(world_) / kLine * kLine;
    uint64_t longest = 0;
    for (const Buffer& p : ins) longest = std::max(longest, p.bytes);
    std::vector<const void*> sources(static_cast<size_t>(world_));
    for (uint64_t n = 0, rounds = rounds_for(longest, room); n < rounds; ++n) {
        bool direct = false;
        auto stage = [&] { stage_parts(ins, n, room); };
        if (Fault f = begin_round(op, n, longest, offerable(ins), world_, direct, stage)) return f;
        if (n == 0) {
            learn_factors(op);
            if (direct) return reduce_offered(op, ins, out);
        } else if (Fault f = await_all(op)) {
            return f;
        }
        Buffer to = part(out, n, room), own = part(ins[size_t(rank_)], n, room);
        for (int r = 0; r < world_; ++r) {
            sources[size_t(r)] = r == rank_ ? own.data : staged(r, false) + uint64_t(rank_) * room;
        }
        fold(op.dtype, op.red, to.data, sources.data(), world_, int64_t(to.bytes / size), factors_.data(),
             world_);
    }
    return {};
}

// Checks that each rank sends what its peer expects. Two rounds: the sizes, then the results, so that every
// rank learns of every disagreement.
Fault Group::check_pairs(const Op& op, const std::vector<Buffer>& ins, const std::vector<Buffer>& outs) {
    if (Fault f = next_round(op)) return f;
    auto* sizes = reinterpret_cast<uint64_t*>(staging(false));
    for (int r = 0; r < world_; ++r) sizes[r] = ins[size_t(r)].bytes;
    if (Fault f = first_round(op, 0)) return f;
    int odd = -1;
    uint64_t sent = 0;
    for (int r = 0; r < world_ && odd < 0; ++r) {
        sent = reinterpret_cast<const uint64_t*>(staged(r, false))[rank_];
        if (sent != outs[size_t(r)].bytes) odd = r;
    }
    if (Fault f = next_round(op)) return f;
    Op verdict = op;
    if (odd >= 0) verdict.count = outs[size_t(odd)].bytes, verdict.extra = sent;
    uint32_t with = uint32_t(odd + 1);
    segment_->announcement(rank_, round_).disagrees_with = with | ~with << 16;
    agreed_ = 0;  // the results differ from rank to rank
    publish(verdict, 0);
    if (Fault f = await_all(op)) return f;
    Fault fault{FaultCode::kMismatch, {}, {}, "sizes"};
    std::vector<int> blame(static_cast<size_t>(world_));
    for (int r = 0; r < world_; ++r) {
        const Announcement& a = segment_->announcement(r, round_);
        uint32_t said = a.disagrees_with;  // one read: never trust a number that another process wrote
        int with = int(said & 0xffff) - 1;
        if ((said >> 16) != (~said & 0xffff) || with >= world_) return damaged(r, "the verdict");
        if (with < 0) continue;
        ++blame[size_t(r)], ++blame[size_t(with)];
        // root: the sender; count: the bytes that the rank expects; extra: the bytes that it would receive
        fault.claims.push_back({r, op.code, uint32_t(op.dtype), 0, with, a.count, a.extra});
    }
    if (fault.claims.empty()) return {};
    int most = *std::max_element(blame.begin(), blame.end());
    for (int r = 0; r < world_; ++r) {
        if (blame[size_t(r)] == most) fault.culprits.push_back(r);
    }
    return fault;
}

Fault Group::all_to_all(const Op& op, const std::vector<Buffer>& ins, const std::vector<Buffer>& outs,
                        bool check_sizes) {
    uint64_t room = segment_->layout().slot_bytes / uint64_t(world_) / kLine * kLine;
    if (check_sizes) {
        if (Fault f = check_pairs(op, ins, outs)) return f;
    }
    uint64_t longest = 0;
    for (const Buffer& p : ins) longest = std::max(longest, p.bytes);
    // Without a check of the sizes all ranks cut alike, though parts may differ.
    const uint64_t own_part = uint64_t(ins[size_t(rank_)].data - ins[0].data);
    ResultCopy result(world_, bytes_of(ins) + bytes_of(outs));
    for (uint64_t n = 0, rounds = 1; n < rounds; ++n) {
        bool direct = false;
        auto stage = [&] { stage_parts(ins, n, room); };
        // Only the owner of unequal parts knows where each begins.
        const char* mine = check_sizes ? nullptr : offerable(ins);
        if (Fault f = begin_round(op, n, longest, mine, world_, direct, stage)) return f;
        if (n == 0) {
            // The parts of other ranks may be longer. The own lengths do not depend on what other processes
            // wrote.
            uint64_t most = longest_of_all();
            for (const Buffer& p : outs) most = std::max(most, p.bytes);
            rounds = rounds_for(std::max(most, longest), room);
            result.copy(outs[size_t(rank_)].data, ins[size_t(rank_)].data, outs[size_t(rank_)].bytes);
        }
        for (int i = 1; i < world_; ++i) {
            int r = (rank_ + i) % world_;
            if (direct) {
                const Buffer& whole = outs[size_t(r)];
                if (whole.bytes == 0) continue;  // an empty part has no address, and so no offset
                if (Fault f = copy_offer(r, own_part, whole, result)) return f;
                continue;
            }
            Buffer to = part(outs[size_t(r)], n, room);
            if (to.bytes == 0) continue;
            if (Fault f = await_round(op, round_, r)) return f;
            result.copy(to.data, staged(r, false) + uint64_t(rank_) * room, to.bytes);
        }
        if (direct) return leave(op, -1);
    }
    return {};
}

}  // namespace unicomm::shm
