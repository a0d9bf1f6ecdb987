// Broadcast, all-to-all, reductions and the exchanges of a mixture of experts, over any table.
#include "symm/composites.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/hash.hpp"
#include "symm/tiles.hpp"

namespace unicomm::symm {
namespace {

const int64_t* numbers(const char* at) { return reinterpret_cast<const int64_t*>(at); }

// Words of an announcement.
enum Word { kMeeting, kSignature, kCalled, kRoot };

// The call, with what a row is: ranks may see memory of the same size as other rows.
Call of_rows(const Call& call, const Rows& in) {
    Call whole = call;
    whole.more = mix(call.more, in.row_bytes);
    return whole;
}

}  // namespace

Fault fault_of(int code, const Error& error) {
    if (code == 0) return {};
    int n = std::clamp<int>(error.n_culprits, 0, int(std::size(error.culprits)));
    return {FaultCode(code), {error.culprits, error.culprits + n}, {}, error.detail};
}

// --- meeting -----------------------------------------------------------------------------------------------

Fault Composites::barrier(uint64_t deadline_ns, Stream stream) {
    ++meetings_;
    Error error{};
    return fault_of(table_.barrier(domain_, deadline_ns, stream, &error), error);
}

Fault Composites::meet(const Call& call, const std::vector<Memory>& tensors, const int64_t* each) {
    uint64_t signature = mix(mix(call.op, uint64_t(call.dtype) << 8 | uint64_t(call.red)), call.more);
    signature = mix(signature, uint64_t(call.root) << 1 | call.relaxed);
    for (const Memory& tensor : tensors) {
        if (tensor.bytes) signature = mix(signature, uint64_t(tensor.data - reinterpret_cast<char*>(said_)));
        signature = mix(signature, tensor.bytes);
    }
    ++meetings_;
    uint64_t* mine = said();
    // The number distinguishes it from announcements of earlier meetings.
    mine[kMeeting] = meetings_;
    mine[kSignature] = signature;
    mine[kCalled] = call.op | uint64_t(call.dtype) << 32 | uint64_t(call.red) << 40;
    mine[kRoot] = uint64_t(int64_t(call.root));
    if (each) std::memcpy(mine + kHead, each, sizeof(int64_t) * size_t(world_));
    Error error{};
    if (int code = table_.barrier(domain_, call.deadline_ns, call.stream, &error))
        return fault_of(code, error);
    uint64_t words = kHead + (each ? uint64_t(world_) : 0);
    if (Fault f = copies(mine, words * sizeof(uint64_t), call.stream, splits_, splits_room_)) return f;
    for (const char* theirs : splits_) {
        if (std::memcmp(theirs, mine, 2 * sizeof(uint64_t)) != 0) return differ(splits_);
    }
    return {};
}

// The culprits are the minority; without a majority, all PEs.
Fault Composites::differ(const std::vector<const char*>& all) const {
    auto same = [&](int a, int b) {
        return std::memcmp(all[size_t(a)], all[size_t(b)], 2 * sizeof(uint64_t)) == 0;
    };
    int most = 0, most_votes = 0;
    for (int pe = 0; pe < world_; ++pe) {
        int votes = 0;
        for (int other = 0; other < world_; ++other) votes += same(pe, other);
        if (votes > most_votes) most = pe, most_votes = votes;
    }
    Fault fault{FaultCode::kMismatch, {}, {}, ""};
    for (int pe = 0; pe < world_; ++pe) {
        const int64_t* words = numbers(all[size_t(pe)]);
        auto called = uint64_t(words[kCalled]);
        bool here = words[kMeeting] == int64_t(meetings_);  // else the PE is not at a meeting
        if (2 * most_votes <= world_ || !same(pe, most)) fault.culprits.push_back(pe);
        fault.claims.push_back({pe, here ? uint32_t(called) : 0, uint32_t(called >> 32 & 0xff),
                                uint32_t(called >> 40 & 0xff), int32_t(words[kRoot]), 0,
                                uint64_t(words[kSignature])});
    }
    return fault;
}

Fault Composites::leave(const Call& call, const Refusal* refusal) {
    if (call.relaxed && !(refusal && refusal->why)) return {};
    return barrier(call.deadline_ns, call.stream);
}

// --- moving ------------------------------------------------------------------------------------------------

Fault Composites::get(void* to, const void* from, uint64_t bytes, int pe, Stream stream) {
    if (bytes == 0) return {};  // its address may be invalid
    Error error{};
    return fault_of(table_.get_nbi(domain_, to, from, bytes, pe, stream, &error), error);
}

void Composites::expect(uint64_t bytes) {
    Error error{};
    if (table_.expect) table_.expect(domain_, bytes, &error);
}

Fault Composites::quiet(Stream stream) {
    Error error{};
    return fault_of(table_.quiet(domain_, stream, &error), error);
}

Fault Composites::copies(const void* at, uint64_t bytes, Stream stream, std::vector<const char*>& out,
                         std::vector<char>& room) {
    out.assign(size_t(world_), nullptr);
    if (bytes == 0) return {};
    if (table_.ptr) {
        for (int pe = 0; pe < world_; ++pe) {
            Error error{};
            void* there = nullptr;
            if (int code = table_.ptr(domain_, at, bytes, pe, &there, &error)) return fault_of(code, error);
            out[size_t(pe)] = static_cast<char*>(there);
        }
        return {};
    }
    uint64_t stride = (bytes + 63) & ~uint64_t{63};
    room.resize(stride * uint64_t(world_));
    for (int pe = 0; pe < world_; ++pe) {
        char* to = room.data() + stride * uint64_t(pe);
        if (Fault f = get(to, at, bytes, pe, stream)) return f;
        out[size_t(pe)] = to;
    }
    return quiet(stream);
}

Fault Composites::broadcast(const Call& call, Memory tensor) {
    if (Fault f = meet(call, {tensor})) return f;
    if (rank_ != call.root) {
        expect(tensor.bytes);
        if (Fault f = get(tensor.data, tensor.data, tensor.bytes, call.root, call.stream)) return f;
        if (Fault f = quiet(call.stream)) return f;
    }
    return leave(call);
}

Fault Composites::all_to_all(const Call& call, Memory in, char* out) {
    if (Fault f = meet(call, {in, {out, in.bytes}})) return f;
    uint64_t block = in.bytes / uint64_t(world_);
    expect(in.bytes);
    for (int i = 0; i < world_; ++i) {
        int pe = (rank_ + i) % world_;  // so that not all read from the same PE at once
        Fault f = get(out + uint64_t(pe) * block, in.data + uint64_t(rank_) * block, block, pe, call.stream);
        if (f) return f;
    }
    if (Fault f = quiet(call.stream)) return f;
    return leave(call);
}

// All PEs check all splits, so that all reach the same result before any row moves.
Fault Composites::move(const Call& call, Rows in, Rows out, const std::vector<const char*>& splits,
                       int64_t* results, int experts, int64_t align, Refusal& refusal) {
    int n = world_;
    size_t columns = size_t(n) * size_t(experts);
    filled_.assign(columns, 0);
    for (int pe = 0; pe < n && !refusal.why; ++pe) {
        const int64_t* theirs = numbers(splits[size_t(pe)]);
        int64_t left = in.rows;
        for (size_t k = 0; k < columns; ++k) {
            if (theirs[k] < 0 || theirs[k] > left) {
                refusal = {Refusal::kSplits, pe, 0};
                break;
            }
            left -= theirs[k];
            filled_[k] += theirs[k];
        }
    }
    for (int pe = 0; pe < n && !refusal.why; ++pe) {
        int64_t start = 0, end = 0;
        for (int e = 0; e < experts; ++e) {
            int64_t rows = filled_[size_t(pe) * size_t(experts) + size_t(e)];
            if (rows) end = start + rows;
            start += align ? std::max<int64_t>((rows + align - 1) / align, 1) * align : rows;
        }
        if (end > out.rows && end > refusal.rows) refusal = {Refusal::kFull, pe, end};
    }
    if (refusal.why) return {};
    int64_t* offsets = results + columns;
    int64_t start = 0;
    for (int e = 0; e < experts; ++e) {
        int64_t place = start;
        for (int pe = 0; pe < n; ++pe) {
            int64_t rows = numbers(splits[size_t(pe)])[size_t(rank_) * size_t(experts) + size_t(e)];
            results[size_t(e) * size_t(n) + size_t(pe)] = rows;
            offsets[size_t(e) * size_t(n) + size_t(pe)] = place;
            place += rows;
        }
        int64_t rows = place - start;
        start += align ? std::max<int64_t>((rows + align - 1) / align, 1) * align : rows;
    }
    uint64_t row = in.row_bytes, total = 0;
    for (size_t k = 0; k < columns; ++k) total += uint64_t(results[k]) * row;
    expect(total);
    for (int i = 0; i < n; ++i) {
        int pe = (rank_ + i) % n;  // not all from the same at once
        const int64_t* theirs = numbers(splits[size_t(pe)]);
        int64_t from = 0;
        for (size_t k = 0; k < size_t(rank_) * size_t(experts); ++k) from += theirs[k];
        for (int e = 0; e < experts; ++e) {
            size_t k = size_t(e) * size_t(n) + size_t(pe);
            if (int64_t rows = results[k]) {
                Fault f = get(out.data + uint64_t(offsets[k]) * row, in.data + uint64_t(from) * row,
                              uint64_t(rows) * row, pe, call.stream);
                if (f) return f;
                from += rows;
            }
        }
    }
    return quiet(call.stream);
}

Fault Composites::all_to_all_v(const Call& call, Rows in, Rows out, const int64_t* splits, int64_t* came,
                               Refusal& refusal) {
    std::vector<Memory> tensors{{in.data, uint64_t(in.rows) * in.row_bytes},
                                {out.data, uint64_t(out.rows) * out.row_bytes}};
    if (Fault f = meet(of_rows(call, in), tensors, splits)) return f;
    for (const char*& theirs : splits_) theirs += kHead * sizeof(uint64_t);
    std::vector<int64_t> results(2 * size_t(world_));
    if (Fault f = move(call, in, out, splits_, results.data(), 1, 0, refusal)) return f;
    if (!refusal.why) std::copy_n(results.data(), world_, came);
    return leave(call, &refusal);
}

Fault Composites::dispatch(const Call& call, Rows in, Rows out, int64_t* splits, int64_t* results,
                           int experts, int64_t align, Refusal& refusal) {
    uint64_t bytes = sizeof(int64_t) * uint64_t(world_) * uint64_t(experts);
    Call whole = call;
    whole.more = mix(of_rows(call, in).more, uint64_t(align));
    std::vector<Memory> tensors{{in.data, uint64_t(in.rows) * in.row_bytes},
                                {out.data, uint64_t(out.rows) * out.row_bytes},
                                {reinterpret_cast<char*>(splits), bytes},
                                {reinterpret_cast<char*>(results), 2 * bytes}};
    if (Fault f = meet(whole, tensors)) return f;
    if (Fault f = copies(splits, bytes, call.stream, splits_, splits_room_)) return f;
    if (Fault f = move(call, in, out, splits_, results, experts, align, refusal)) return f;
    return leave(call, &refusal);
}

Fault Composites::combine(const Call& call, Rows in, Rows out, int64_t* splits, int64_t* results, int experts,
                          Refusal& refusal) {
    int n = world_;
    size_t columns = size_t(n) * size_t(experts);
    uint64_t bytes = 2 * sizeof(int64_t) * columns;
    std::vector<Memory> tensors{{in.data, uint64_t(in.rows) * in.row_bytes},
                                {out.data, uint64_t(out.rows) * out.row_bytes},
                                {reinterpret_cast<char*>(splits), bytes},
                                {reinterpret_cast<char*>(results), bytes}};
    if (Fault f = meet(of_rows(call, in), tensors)) return f;
    if (Fault f = copies(splits, bytes, call.stream, splits_, splits_room_)) return f;
    filled_.assign(size_t(n), 0);
    for (int pe = 0; pe < n && !refusal.why; ++pe) {
        const int64_t *theirs = numbers(splits_[size_t(pe)]), *begins = theirs + columns;
        for (size_t k = 0; k < columns; ++k) {
            // The offset of an empty block may be any number.
            bool beyond = theirs[k] > in.rows || begins[k] < 0 || begins[k] > in.rows - theirs[k];
            if (theirs[k] < 0 || (theirs[k] > 0 && beyond)) {
                refusal = {Refusal::kSplits, pe, 0};
                break;
            }
            filled_[k % size_t(n)] += theirs[k];
        }
    }
    for (int pe = 0; pe < n && refusal.why != Refusal::kSplits; ++pe) {
        int64_t rows = filled_[size_t(pe)];
        if (rows > out.rows && rows > refusal.rows) refusal = {Refusal::kFull, pe, rows};
    }
    if (!refusal.why) {
        int64_t* offsets = results + columns;
        int64_t place = 0;
        for (int pe = 0; pe < n; ++pe) {
            for (int e = 0; e < experts; ++e) {
                size_t to = size_t(pe) * size_t(experts) + size_t(e);
                results[to] = numbers(splits_[size_t(pe)])[size_t(e) * size_t(n) + size_t(rank_)];
                offsets[to] = place;
                place += results[to];
            }
        }
        expect(uint64_t(place) * in.row_bytes);
        for (int i = 0; i < n; ++i) {
            int pe = (rank_ + i) % n;
            const int64_t* begins = numbers(splits_[size_t(pe)]) + columns;
            for (int e = 0; e < experts; ++e) {
                size_t to = size_t(pe) * size_t(experts) + size_t(e);
                if (results[to] == 0) continue;
                Fault f =
                    get(out.data + uint64_t(offsets[to]) * in.row_bytes,
                        in.data + uint64_t(begins[size_t(e) * size_t(n) + size_t(rank_)]) * in.row_bytes,
                        uint64_t(results[to]) * in.row_bytes, pe, call.stream);
                if (f) return f;
            }
        }
        if (Fault f = quiet(call.stream)) return f;
    }
    return leave(call, &refusal);
}

// --- reducing ----------------------------------------------------------------------------------------------

namespace {

Fault undefined() { return {FaultCode::kInternal, {}, {}, "the reduction is not defined"}; }

}  // namespace

Fault Composites::one_shot(const Call& call, Memory in, char* out) {
    if (Fault f = meet(call, {in})) return f;
    if (Fault f = copies(in.data, in.bytes, call.stream, sources_, sources_room_)) return f;
    int64_t count = int64_t(in.bytes) / dtype_bytes(call.dtype);
    if (!fold_all(call.dtype, call.red, out, sources_, 0, count)) return undefined();
    return leave(call);
}

Fault Composites::two_shot(const Call& call, Memory in) {
    if (Fault f = meet(call, {in})) return f;
    int element = dtype_bytes(call.dtype);
    int64_t count = int64_t(in.bytes) / element;
    int64_t begin = count * rank_ / world_, end = count * (rank_ + 1) / world_;
    uint64_t bytes = uint64_t(end - begin) * uint64_t(element);
    char* part = in.data + begin * element;
    if (bytes) {
        if (Fault f = copies(part, bytes, call.stream, sources_, sources_room_)) return f;
        // No other PE reads or writes this part of any copy before the barrier at the end.
        if (!fold_all(call.dtype, call.red, part, sources_, 0, end - begin)) return undefined();
        expect(bytes * uint64_t(world_ - 1));
        for (int i = 1; i < world_; ++i) {
            Error error{};
            int pe = (rank_ + i) % world_;
            int code = table_.put_nbi(domain_, part, part, bytes, pe, call.stream, &error);
            if (code) return fault_of(code, error);
        }
        if (Fault f = quiet(call.stream)) return f;
    }
    return barrier(call.deadline_ns, call.stream);
}

Fault Composites::reduce_scatter(const Call& call, Memory in, int64_t rows, char* out) {
    Call whole = call;
    whole.more = mix(call.more, uint64_t(rows));
    if (Fault f = meet(whole, {in})) return f;
    int element = dtype_bytes(call.dtype);
    int64_t part = int64_t(in.bytes) / element / std::max<int64_t>(rows, 1) / world_;
    // From the first to the last element of the own parts.
    uint64_t span = uint64_t((rows - 1) * part * world_ + part) * uint64_t(element);
    if (part && rows) {
        char* first = in.data + rank_ * part * element;
        if (Fault f = copies(first, span, call.stream, sources_, sources_room_)) return f;
    }
    for (int64_t row = 0; part && row < rows; ++row) {
        int64_t at = row * part * world_ * element;
        if (!fold_all(call.dtype, call.red, out + row * part * element, sources_, at, part))
            return undefined();
    }
    return leave(call);
}

Fault Composites::reduce_tiles(const Call& call, const std::vector<Tile>& ins, const std::vector<int>& owners,
                               const std::vector<Tile>& outs) {
    Call whole = call;
    auto* base = reinterpret_cast<char*>(said_);
    for (size_t i = 0; i < ins.size(); ++i) {
        const Tile& t = ins[i];
        int64_t at = t.rows && t.columns ? t.data - base : 0;  // an empty tile has no address
        for (int64_t word : {at, t.rows, t.columns, t.row_step, t.column_step, int64_t(owners[i])}) {
            whole.more = mix(whole.more, uint64_t(word));
        }
    }
    if (Fault f = meet(whole, {})) return f;
    for (size_t i = 0, own = 0; i < ins.size(); ++i) {
        if (owners[i] != rank_) continue;
        const Tile& out = outs[own++];
        uint64_t bytes = span_of(ins[i]) * uint64_t(dtype_bytes(call.dtype));
        if (bytes == 0) continue;
        if (Fault f = copies(ins[i].data, bytes, call.stream, sources_, sources_room_)) return f;
        if (!fold_tiles(call.dtype, call.red, out, ins[i], sources_)) return undefined();
    }
    return leave(call);
}

}  // namespace unicomm::symm
