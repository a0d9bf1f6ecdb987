// The collectives of a Group, all in the rounds that group.hpp describes.
#include <algorithm>
#include <cstring>

#include "shm/group.hpp"

namespace unicomm::shm {
namespace {

constexpr uint64_t kInline = sizeof(Announcement::inline_data);
constexpr uint64_t kOneShotBytes = 64 * 1024;  // larger all-reduces share the work of reducing

// The part of a stream that travels in the n-th round.
Piece part(Piece stream, uint64_t n, uint64_t room) {
    uint64_t begin = std::min(n * room, stream.bytes);
    return {stream.data + begin, std::min(room, stream.bytes - begin)};
}

void copy(char* to, const char* from, uint64_t bytes) {
    if (bytes != 0 && to != from) std::memmove(to, from, bytes);
}

uint64_t rounds_for(uint64_t longest, uint64_t room) {
    return std::max<uint64_t>(1, (longest + room - 1) / room);
}

}  // namespace

void Group::alone(const Op& op, const std::vector<Piece>& ins, const std::vector<Piece>& outs) {
    if (ins.empty() || outs.empty()) return;
    if (op.red == Red::kNone) return copy(outs[0].data, ins[0].data, outs[0].bytes);
    const void* source = ins[0].data;
    int64_t count = int64_t(outs[0].bytes / uint64_t(dtype_bytes(op.dtype)));
    fold(op.dtype, op.red, outs[0].data, &source, 1, count, &op.factor, 1);
}

Fault Group::barrier(const Op& op) {
    if (Fault f = next_round(op)) return f;
    return first_round(op, 0);
}

Fault Group::broadcast(const Op& op, Piece buffer) {
    uint64_t room = segment_->layout().slot_bytes;
    bool in_line = buffer.bytes <= kInline;
    bool root = rank_ == op.root;
    for (uint64_t n = 0, rounds = rounds_for(buffer.bytes, room); n < rounds; ++n) {
        Piece now = part(buffer, n, room);
        auto stage = [&] {
            if (root) stager_.copy(staging(in_line, buffer.bytes), now.data, now.bytes);
        };
        if (n == 0) {
            bool direct = false;
            const char* mine = root ? offerable(buffer.data, buffer.bytes) : nullptr;
            if (Fault f = open(op, buffer.bytes, mine, 1, direct, stage)) return f;
            if (direct) {
                if (root) return leave(op, -1);
                const char* theirs = nullptr;
                if (Fault f = locate(op.root, 0, buffer.bytes, theirs)) return f;
                copy(buffer.data, theirs, buffer.bytes);
                return leave(op, rank_);
            }
        } else {
            if (Fault f = next_round(op)) return f;
            stage();
            publish(op, buffer.bytes);
            if (Fault f = await_round(op, round_, op.root)) return f;
        }
        if (!root) copy(now.data, staged(op.root, in_line, buffer.bytes), now.bytes);
    }
    return {};
}

void Group::learn_factors(const Op& op) {
    if (op.red != Red::kPremulSum) return;
    for (int r = 0; r < world_; ++r) factors_[size_t(r)] = segment_->announcement(r, round_).factor;
}

Fault Group::all_reduce(const Op& op, const char* in, char* out, uint64_t count) {
    uint64_t bytes = count * uint64_t(dtype_bytes(op.dtype));
    // Two ranks write and read as much in one shot as in two, and wait for each other half as often.
    bool small = bytes <= std::min(kOneShotBytes, uint64_t(segment_->layout().slot_bytes));
    return small || world_ == 2 ? one_shot(op, in, out, count) : two_shot(op, in, out, count);
}

// Every rank reads everything and reduces all of it: one round a chunk.
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
        if (begin == 0) {
            if (Fault f = first_round(op, count * size)) return f;
            learn_factors(op);
        } else {
            publish(op, count * size);
            if (Fault f = await_all(op)) return f;
        }
        if (!out || len == 0) continue;
        for (int r = 0; r < world_; ++r) sources[size_t(r)] = r == rank_ ? source : staged(r, in_line, span);
        fold(op.dtype, op.red, out + begin * size, sources.data(), world_, int64_t(len), factors_.data(),
             world_);
    }
    return {};
}

// Each chunk in two rounds: every rank reduces its share of the chunk, then all collect the shares.
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
        // The own share is read where it is: others never need it.
        stager_.copy(slot, source, from(rank_) * size);
        stager_.copy(slot + from(rank_ + 1) * size, source + from(rank_ + 1) * size,
                     (len - from(rank_ + 1)) * size);
        if (begin == 0) {
            if (Fault f = first_round(op, count * size)) return f;
            learn_factors(op);
        } else {
            publish(op, count * size);
            if (Fault f = await_all(op)) return f;
        }
        uint64_t mine = from(rank_) * size;
        for (int r = 0; r < world_; ++r) {
            sources[size_t(r)] = (r == rank_ ? source : staged(r, false)) + mine;
        }
        // All others have read my slot of the round before (they are in this one), so the next round's
        // slot is free already.
        char* shared = segment_->slot(rank_, round_ + 1);
        char* result = out ? out + begin * size + mine : shared;
        fold(op.dtype, op.red, result, sources.data(), world_, int64_t(elements(rank_)), factors_.data(),
             world_);
        if (out) stager_.copy(shared, result, elements(rank_) * size);
        if (Fault f = next_round(op)) return f;
        publish(op, count * size);
        if (out) {
            // Start behind oneself, so that not all ranks read the same rank's slot at once.
            for (int i = 1; i < world_; ++i) {
                int r = (rank_ + i) % world_;
                if (Fault f = await_round(op, round_, r)) return f;
                copy(out + (begin + from(r)) * size, staged(r, false), elements(r) * size);
            }
        }
    }
    return {};
}

Fault Group::all_gather(const Op& op, Piece in, const std::vector<Piece>& outs) {
    uint64_t room = segment_->layout().slot_bytes;
    uint64_t longest = 0;
    for (const Piece& p : outs) longest = std::max(longest, p.bytes);
    bool in_line = longest <= kInline;
    for (uint64_t n = 0, rounds = rounds_for(longest, room); n < rounds; ++n) {
        Piece now = part(in, n, room);
        auto stage = [&] { stager_.copy(staging(in_line, longest), now.data, now.bytes); };
        if (n == 0) {
            bool direct = false;
            if (Fault f = open(op, longest, offerable(in.data, in.bytes), world_, direct, stage)) return f;
            copy(outs[size_t(rank_)].data, in.data, in.bytes);
            for (int i = 1; direct && i < world_; ++i) {
                int r = (rank_ + i) % world_;
                const Piece& to = outs[size_t(r)];
                const char* theirs = nullptr;
                if (Fault f = locate(r, 0, to.bytes, theirs)) return f;
                copy(to.data, theirs, to.bytes);
            }
            if (direct) return leave(op, -1);
        } else {
            if (Fault f = next_round(op)) return f;
            stage();
            publish(op, longest);
        }
        for (int i = 1; i < world_; ++i) {
            int r = (rank_ + i) % world_;
            Piece to = part(outs[size_t(r)], n, room);
            if (to.bytes == 0) continue;
            if (Fault f = await_round(op, round_, r)) return f;
            copy(to.data, staged(r, in_line, longest), to.bytes);
        }
    }
    return {};
}

Fault Group::gather(const Op& op, Piece in, const std::vector<Piece>& outs) {
    uint64_t room = segment_->layout().slot_bytes;
    bool in_line = in.bytes <= kInline;
    for (uint64_t n = 0, rounds = rounds_for(in.bytes, room); n < rounds; ++n) {
        Piece now = part(in, n, room);
        auto stage = [&] {
            if (rank_ != op.root) stager_.copy(staging(in_line), now.data, now.bytes);
        };
        if (n == 0) {
            bool direct = false;
            const char* mine = rank_ == op.root ? nullptr : offerable(in.data, in.bytes);
            if (Fault f = open(op, in.bytes, mine, world_ - 1, direct, stage)) return f;
            if (direct && rank_ != op.root) return leave(op, op.root);
            for (int r = 0; direct && r < world_; ++r) {
                const char* theirs = in.data;
                if (r != rank_) {
                    if (Fault f = locate(r, 0, outs[size_t(r)].bytes, theirs)) return f;
                }
                copy(outs[size_t(r)].data, theirs, outs[size_t(r)].bytes);
            }
            if (direct) return leave(op, rank_);
        } else {
            if (Fault f = next_round(op)) return f;
            stage();
            publish(op, in.bytes);
        }
        if (rank_ != op.root) continue;
        if (n == 0) copy(outs[size_t(rank_)].data, in.data, in.bytes);
        for (int r = 0; r < world_; ++r) {
            if (r == rank_) continue;
            if (Fault f = await_round(op, round_, r)) return f;
            Piece to = part(outs[size_t(r)], n, room);
            copy(to.data, staged(r, in_line), to.bytes);
        }
    }
    return {};
}

Fault Group::scatter(const Op& op, const std::vector<Piece>& ins, Piece out) {
    uint64_t room = segment_->layout().slot_bytes / uint64_t(world_) / kLine * kLine;
    for (uint64_t n = 0, rounds = rounds_for(out.bytes, room); n < rounds; ++n) {
        auto stage = [&] {
            if (rank_ == op.root) stage_parts(ins, n, room);
        };
        if (n == 0) {
            bool direct = false;
            const char* mine = rank_ == op.root ? offerable(ins) : nullptr;
            if (Fault f = open(op, out.bytes, mine, 1, direct, stage)) return f;
            if (rank_ == op.root) {
                copy(out.data, ins[size_t(rank_)].data, out.bytes);
                if (direct) return leave(op, -1);
            } else if (direct) {
                const char* theirs = nullptr;
                if (Fault f = locate(op.root, uint64_t(rank_) * out.bytes, out.bytes, theirs)) return f;
                copy(out.data, theirs, out.bytes);
                return leave(op, rank_);
            }
        } else {
            if (Fault f = next_round(op)) return f;
            stage();
            publish(op, out.bytes);
            if (Fault f = await_round(op, round_, op.root)) return f;
        }
        if (rank_ != op.root) {
            Piece to = part(out, n, room);
            copy(to.data, staged(op.root, false) + uint64_t(rank_) * room, to.bytes);
        }
    }
    return {};
}

Fault Group::reduce_offered(const Op& op, const std::vector<Piece>& ins, Piece out) {
    std::vector<const void*> sources(static_cast<size_t>(world_));
    uint64_t offset = uint64_t(ins[size_t(rank_)].data - ins[0].data);
    for (int r = 0; r < world_; ++r) {
        const char* data = ins[size_t(rank_)].data;
        if (r != rank_) {
            if (Fault f = locate(r, offset, out.bytes, data)) return f;
        }
        sources[size_t(r)] = data;
    }
    int64_t count = int64_t(out.bytes / uint64_t(dtype_bytes(op.dtype)));
    fold(op.dtype, op.red, out.data, sources.data(), world_, count, factors_.data(), world_);
    return leave(op, -1);
}

// A part for each of the others.
void Group::stage_parts(const std::vector<Piece>& ins, uint64_t n, uint64_t room) {
    for (int r = 0; r < world_; ++r) {
        if (r == rank_) continue;
        Piece now = part(ins[size_t(r)], n, room);
        stager_.copy(staging(false) + uint64_t(r) * room, now.data, now.bytes);
    }
}

Fault Group::reduce_scatter(const Op& op, const std::vector<Piece>& ins, Piece out) {
    uint64_t size = uint64_t(dtype_bytes(op.dtype));
    uint64_t room = segment_->layout().slot_bytes / uint64_t(world_) / kLine * kLine;
    uint64_t longest = 0;
    for (const Piece& p : ins) longest = std::max(longest, p.bytes);
    std::vector<const void*> sources(static_cast<size_t>(world_));
    for (uint64_t n = 0, rounds = rounds_for(longest, room); n < rounds; ++n) {
        if (n == 0) {
            bool direct = false;
            auto stage = [&] { stage_parts(ins, n, room); };
            if (Fault f = open(op, longest, offerable(ins), world_, direct, stage)) return f;
            learn_factors(op);
            if (direct) return reduce_offered(op, ins, out);
        } else {
            if (Fault f = next_round(op)) return f;
            stage_parts(ins, n, room);
            publish(op, longest);
            if (Fault f = await_all(op)) return f;
        }
        Piece to = part(out, n, room), own = part(ins[size_t(rank_)], n, room);
        for (int r = 0; r < world_; ++r) {
            sources[size_t(r)] = r == rank_ ? own.data : staged(r, false) + uint64_t(rank_) * room;
        }
        fold(op.dtype, op.red, to.data, sources.data(), world_, int64_t(to.bytes / size), factors_.data(),
             world_);
    }
    return {};
}

// What each rank sends must be what its peer expects. Two rounds: the sizes, then the verdicts, so that
// every rank learns of every disagreement.
Fault Group::check_pairs(const Op& op, const std::vector<Piece>& ins, const std::vector<Piece>& outs) {
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
    agreed_ = 0;  // each says its own
    publish(verdict, 0);
    if (Fault f = await_all(op)) return f;
    Fault fault{FaultCode::kMismatch, {}, {}, "sizes"};
    std::vector<int> blame(static_cast<size_t>(world_));
    for (int r = 0; r < world_; ++r) {
        const Announcement& a = segment_->announcement(r, round_);
        uint32_t said = a.disagrees_with;  // once; never trust a number that another process wrote
        int with = int(said & 0xffff) - 1;
        if ((said >> 16) != (~said & 0xffff) || with >= world_) return damaged(r, "the verdict");
        if (with < 0) continue;
        ++blame[size_t(r)], ++blame[size_t(with)];
        // root carries the sender, count what the rank expects and extra what it would get, in bytes
        fault.claims.push_back({r, op.code, uint32_t(op.dtype), 0, with, a.count, a.extra});
    }
    if (fault.claims.empty()) return {};
    int most = *std::max_element(blame.begin(), blame.end());
    for (int r = 0; r < world_; ++r) {
        if (blame[size_t(r)] == most) fault.culprits.push_back(r);
    }
    return fault;
}

Fault Group::all_to_all(const Op& op, const std::vector<Piece>& ins, const std::vector<Piece>& outs,
                        bool check_sizes) {
    uint64_t room = segment_->layout().slot_bytes / uint64_t(world_) / kLine * kLine;
    if (check_sizes) {
        if (Fault f = check_pairs(op, ins, outs)) return f;
    }
    uint64_t longest = 0;
    for (const Piece& p : ins) longest = std::max(longest, p.bytes);
    for (uint64_t n = 0, rounds = 1; n < rounds; ++n) {
        if (n == 0) {
            bool direct = false;
            auto stage = [&] { stage_parts(ins, n, room); };
            // Of unequal parts only their owner knows where they are.
            const char* mine = check_sizes ? nullptr : offerable(ins);
            if (Fault f = open(op, longest, mine, world_, direct, stage)) return f;
            // The others' may be longer; the own ones are not left to what others wrote.
            uint64_t most = longest_of_all();
            for (const Piece& p : outs) most = std::max(most, p.bytes);
            rounds = rounds_for(std::max(most, longest), room);
            copy(outs[size_t(rank_)].data, ins[size_t(rank_)].data, outs[size_t(rank_)].bytes);
            for (int i = 1; direct && i < world_; ++i) {
                int r = (rank_ + i) % world_;
                const Piece& to = outs[size_t(r)];
                const char* theirs = nullptr;
                if (Fault f = locate(r, uint64_t(rank_) * to.bytes, to.bytes, theirs)) return f;
                copy(to.data, theirs, to.bytes);
            }
            if (direct) return leave(op, -1);
        } else {
            if (Fault f = next_round(op)) return f;
            stage_parts(ins, n, room);
            publish(op, longest);
        }
        for (int i = 1; i < world_; ++i) {
            int r = (rank_ + i) % world_;
            Piece to = part(outs[size_t(r)], n, room);
            if (to.bytes == 0) continue;
            if (Fault f = await_round(op, round_, r)) return f;
            copy(to.data, staged(r, false) + uint64_t(rank_) * room, to.bytes);
        }
    }
    return {};
}

}  // namespace unicomm::shm
