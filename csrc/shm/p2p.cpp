// Point-to-point messages of a Group: one ring of chunks for each ordered pair.
#include "shm/p2p.hpp"

#include <algorithm>
#include <cstring>
#include <set>

#include "base/clock.hpp"
#include "operations/opcode.hpp"
#include "shm/waiting/deferred.hpp"

namespace unicomm::shm {
namespace {

constexpr uint64_t kLong = 256 * 1024;  // bytes of a long message

// Gets the lines of a small message from the caches of another core side by side, before they are needed.
template <int kToWrite>
void fetch(const char* chunk) {
    __builtin_prefetch(chunk, kToWrite);
    __builtin_prefetch(chunk + kLine, kToWrite);
}

// Whether a message of this size and type is one for the receive `m`.
bool fits(const Message& m, uint64_t bytes, uint64_t count, uint32_t dtype) {
    return bytes == m.buffer.bytes && count == m.count && dtype == uint32_t(m.dtype);
}

// Whether `t` is a receive that no message has come for.
bool waits(const Transfer& t) { return !t.message.send && !t.finished && t.number == Transfer::kUnmatched; }

std::vector<int> both(int a, int b) { return {std::min(a, b), std::max(a, b)}; }

}  // namespace

size_t Exchange::add(const Message& message) {
    Transfer t;
    t.message = message;
    t.index = added_++;
    if (message.send) t.number = group_.ends_[size_t(message.peer)].sent++;
    transfers_.push_back(std::move(t));
    return added_ - 1;
}

void Exchange::interrupt() {
    interrupted_ = true;
    group_.waiter_.wake_me();
}

void Exchange::finish(Transfer& t) {
    t.finished = true;
    Group::Ends& ends = group_.ends_[size_t(t.message.peer)];
    ++(t.message.send ? ends.sends_done : ends.receives_done);
}

void Exchange::refuse(Transfer& t, Fault fault) {
    t.fault = std::move(fault);
    finish(t);
}

uint64_t Exchange::unread(int peer) {
    uint64_t head = 0, tail = group_.ends_[size_t(peer)].tail;
    uint64_t word = group_.segment_->channel(peer, group_.rank_).head.load(std::memory_order_acquire);
    if (read_checksummed(word, head) && head >= tail && head - tail <= group_.segment_->layout().p2p_depth)
        return head - tail;
    damaged_ = peer;
    return 0;
}

uint64_t Exchange::unacknowledged(int peer) {
    uint64_t head = group_.ends_[size_t(peer)].head, tail = 0;
    uint64_t word = group_.segment_->channel(group_.rank_, peer).tail.load(std::memory_order_acquire);
    if (read_checksummed(word, tail) && tail <= head && head - tail <= group_.segment_->layout().p2p_depth) {
        group_.ends_[size_t(peer)].acknowledged = tail;
        return head - tail;
    }
    damaged_ = peer;
    return 0;
}

bool Exchange::has_room(int peer, uint64_t chunks) {
    const Group::Ends& ends = group_.ends_[size_t(peer)];
    const uint64_t depth = group_.segment_->layout().p2p_depth;
    return ends.head - ends.acknowledged + chunks <= depth || unacknowledged(peer) + chunks <= depth;
}

bool Exchange::is_rejected(const Transfer& t) {
    if (t.done == 0 && !t.offered) return false;
    const Channel& c = group_.segment_->channel(group_.rank_, t.message.peer);
    return c.rejected.load(std::memory_order_acquire) == with_checksum(t.number + 1);
}

bool Exchange::read_header(int peer, ChunkHeader& header) {
    uint64_t number = group_.ends_[size_t(peer)].tail;
    const char* chunk = group_.segment_->chunk(peer, group_.rank_, number);
    std::memcpy(&header, chunk, sizeof header);
    if (header.checksum == header.expected_checksum(number) &&
        header.bytes <= group_.segment_->layout().p2p_chunk)
        return true;
    damaged_ = peer;
    return false;
}

// Whether a message that nobody has taken is at the front of the channel from `peer`; then also its header.
// False with `damaged_` set if something is damaged.
bool Exchange::front(int peer, ChunkHeader& header) {
    Channel& c = group_.segment_->channel(peer, group_.rank_);
    Group::Ends& ends = group_.ends_[size_t(peer)];
    while (unread(peer) > 0) {
        if (!read_header(peer, header)) return false;
        if (header.message >= ends.received) return true;
        c.tail.store(with_checksum(++ends.tail), std::memory_order_release);  // the rest of a refused message
        group_.waiter_.wake(peer);
    }
    return false;
}

// The first whole message from `peer` with this tag that has arrived before a receive for it.
Transfer* Exchange::early_from(int peer, uint32_t tag) {
    for (Transfer& t : group_.early_) {
        if (t.message.peer == peer && t.message.tag == tag && t.number != Transfer::kUnmatched)
            return t.finished ? &t : nullptr;
    }
    return nullptr;
}

// Whether an earlier receive takes what `t` would take from `peer`. In this pass its turn came before that
// message was at the front; it gets the next one.
bool Exchange::wanted_before(const Transfer& t, int peer) const {
    for (const Transfer& earlier : transfers_) {
        if (&earlier == &t) return false;
        if (waits(earlier) && earlier.message.tag == t.message.tag &&
            (earlier.message.peer == peer || earlier.message.peer < 0))
            return true;
    }
    return false;
}

// Whether a message from `peer` is for `t`: one that has arrived early, or the one at the front of the
// channel. A message goes to the first receive, in the order of the calls, that accepts it.
bool Exchange::match(Transfer& t, int peer) {
    Group::Ends& ends = group_.ends_[size_t(peer)];
    if (!group_.early_.empty() && (t.early = early_from(peer, t.message.tag))) {
        t.number = t.early->number;
        t.early->number = Transfer::kUnmatched;  // taken
        t.message.peer = peer;
        return true;
    }
    if (ends.received != ends.receives_done) return false;  // the previous message is still in progress
    if (closed_[size_t(peer)] == pass_) return false;
    ChunkHeader header;
    if (front(peer, header)) {
        if (header.tag != t.message.tag || wanted_before(t, peer)) return false;
        t.number = ends.received++;
        t.message.peer = peer;
        return true;
    }
    if (damaged_ >= 0) return true;
    closed_[size_t(peer)] = pass_;
    return false;
}

// The message from `peer` of which a part is stored, if there is one.
Transfer* Exchange::storing_from(int peer) {
    for (Transfer& t : group_.early_) {
        if (t.message.peer == peer && !t.finished) return &t;
    }
    return nullptr;
}

// Whether a message from `peer` has to be read into memory of its own: it, or the rest of it, stands before
// those that receives wait for, and none of these has its tag.
bool Exchange::can_store(int peer) {
    if (storing_from(peer)) return unread(peer) > 0 || damaged_ >= 0;
    Group::Ends& ends = group_.ends_[size_t(peer)];
    if (ends.received != ends.receives_done || closed_[size_t(peer)] == pass_) return false;
    ChunkHeader header;
    if (!front(peer, header)) return damaged_ >= 0;
    return std::none_of(transfers_.begin(), transfers_.end(), [&](const Transfer& t) {
        return waits(t) && (t.message.peer == peer || t.message.peer < 0) && t.message.tag == header.tag;
    });
}

// The ranks from which a message has to be stored now. None if no receive waits.
std::vector<int> Exchange::storable() {
    std::vector<int> ranks;
    auto look = [&](int peer) {
        if (std::find(ranks.begin(), ranks.end(), peer) == ranks.end() && can_store(peer))
            ranks.push_back(peer);
    };
    for (const Transfer& t : transfers_) {
        if (!waits(t)) continue;
        if (t.message.peer >= 0) {
            look(t.message.peer);
            continue;
        }
        for (int r = 0; r < group_.world_; ++r) {
            if (r != group_.rank_) look(r);
        }
    }
    return ranks;
}

Fault Exchange::store(int peer) {
    if (Transfer* begun = storing_from(peer)) return step_recv(*begun);
    ChunkHeader header;
    if (!front(peer, header)) return {};
    Transfer t;
    t.memory.reset(new (std::nothrow) char[std::max<uint64_t>(header.total, 1)]);
    if (!t.memory) {
        return group_.break_group({FaultCode::kInternal, {group_.rank_}, {}, "no memory for a message"});
    }
    t.message = {false, peer, {t.memory.get(), header.total}, DType(header.dtype), header.count, header.tag};
    t.number = group_.ends_[size_t(peer)].received++;
    group_.early_.push_back(std::move(t));
    return step_recv(group_.early_.back());
}

// Gives a receive the message that had arrived before it.
void Exchange::take_early(Transfer& t) {
    const Message& m = t.message;
    const Message& arrived = t.early->message;
    if (!fits(m, arrived.buffer.bytes, arrived.count, uint32_t(arrived.dtype))) {
        t.fault = mismatch(t, uint32_t(arrived.dtype), arrived.count);
    } else if (m.buffer.bytes) {
        std::memcpy(m.buffer.data, arrived.buffer.data, m.buffer.bytes);
    }
    group_.early_.remove_if([&](const Transfer& other) { return &other == t.early; });
    t.early = nullptr;
    t.finished = true;
}

Fault Exchange::mismatch(const Transfer& t, uint32_t dtype, uint64_t count) const {
    const Message& m = t.message;
    int me = group_.rank_;
    Claim theirs{m.peer, uint32_t(OpCode::kSend), dtype, 0, me, count, 0};
    Claim mine{me, uint32_t(OpCode::kRecv), uint32_t(m.dtype), 0, m.peer, m.count, 0};
    return {FaultCode::kMismatch, both(me, m.peer), {theirs, mine}, "the sender's tensor differs"};
}

// Also returns true if something is damaged; `damaged_` is then the rank that wrote it.
bool Exchange::can_step(Transfer& t) {
    int me = group_.rank_, peer = t.message.peer;
    if (t.finished) return false;
    if (t.message.send) {
        if (t.number != group_.ends_[size_t(peer)].sends_done) return false;
        if (is_rejected(t)) return true;
        const bool can = t.offered ? unacknowledged(peer) == 0 : has_room(peer, 1);
        return can || damaged_ >= 0;
    }
    if (t.early) return true;
    if (t.number == Transfer::kUnmatched) {
        if (peer >= 0) return match(t, peer);
        for (int r = 0; r < group_.world_; ++r) {
            if (r != me && match(t, r)) return true;
        }
        return false;
    }
    return unread(peer) > 0 || damaged_ >= 0;
}

void Exchange::step_send(Transfer& t) {
    const Message& m = t.message;
    int me = group_.rank_;
    Channel& c = group_.segment_->channel(me, m.peer);
    Group::Ends& ends = group_.ends_[size_t(m.peer)];
    const Layout& l = group_.segment_->layout();
    while (!t.finished) {
        if (is_rejected(t)) {
            refuse(t, {FaultCode::kMismatch, both(me, m.peer), {}, "the receiver's tensor differs"});
            return;
        }
        if (t.offered) {
            if (unacknowledged(m.peer) > 0 || damaged_ >= 0) return;
            if (c.unreadable.load(std::memory_order_acquire) != with_checksum(t.number + 1)) return finish(t);
            t.offered = 0;
            t.staged = true;
        }
        if (!has_room(m.peer, 1) || damaged_ >= 0) return;
        auto* header = reinterpret_cast<ChunkHeader*>(group_.segment_->chunk(me, m.peer, ends.head));
        // A message that fits into the ring is complete for the sender once it is copied, wherever the tensor
        // lies.
        const char* rest = m.buffer.data + t.done;
        uint64_t left = m.buffer.bytes - t.done, ring = uint64_t(l.p2p_chunk) * l.p2p_depth;
        bool whole = t.done == 0 && !t.staged && m.buffer.bytes > ring;
        bool in_heap = whole && Heap::holds(m.buffer.data, m.buffer.bytes);
        bool in_process = whole && group_.readers_[size_t(m.peer)];
        bool offer = in_heap || in_process;
        uint64_t now = offer ? 0 : std::min<uint64_t>(l.p2p_chunk, left);
        Offer where{};
        if (in_heap) {
            where = Group::offer_of(m.buffer.data);
        } else if (in_process) {
            where = {reinterpret_cast<uint64_t>(rest), kInItsProcess, -1, 0};
        }
        ChunkHeader said{t.number,        m.buffer.bytes,
                         m.count,         uint32_t(m.dtype),
                         uint32_t(now),   where.at,
                         where.heap_size, int32_t(where.heap_fd),
                         m.tag,           0};
        said.checksum = said.expected_checksum(ends.head);
        std::memcpy(header, &said, sizeof said);
        char* chunk = reinterpret_cast<char*>(header + 1);
        if (m.buffer.bytes >= kLong && ring < kLargeRing) {
            Stager::stream(chunk, rest, now);
        } else {
            group_.stager_.copy(chunk, rest, now);
        }
        c.head.store(with_checksum(++ends.head), std::memory_order_release);
        group_.waiter_.wake(m.peer);
        Deferred::announced();
        if (offer) t.offered = ends.head;
        t.done += now;
        if (t.done == m.buffer.bytes) finish(t);
    }
    fetch<1>(group_.segment_->chunk(me, m.peer, ends.head));
}

Fault Exchange::step_recv(Transfer& t) {
    if (t.early) {
        take_early(t);
        return {};
    }
    const Message& m = t.message;
    int me = group_.rank_;
    Channel& c = group_.segment_->channel(m.peer, me);
    Group::Ends& ends = group_.ends_[size_t(m.peer)];
    const ResultCopy result(2, m.buffer.bytes);  // the sender reads as much
    // The sender's count is read again only when all chunks that it told of have been read.
    uint64_t known = 0;
    while (!t.finished && (known > 0 || (known = unread(m.peer)) > 0)) {
        --known;
        ChunkHeader header;
        if (!read_header(m.peer, header)) return {};
        if (!t.begun && !fits(m, header.total, header.count, header.dtype)) {
            c.rejected.store(with_checksum(t.number + 1), std::memory_order_release);
            refuse(t, mismatch(t, header.dtype, header.count));
            group_.waiter_.wake(m.peer);
            return {};
        }
        const char* data = group_.segment_->chunk(m.peer, me, ends.tail) + sizeof header;
        uint64_t left = m.buffer.bytes - t.done, now = header.bytes;
        if (header.heap_size == kInItsProcess) {
            bool there = false;
            if (Fault f = group_.read_in(m.peer, header.at, {m.buffer.data + t.done, left}, there)) return f;
            if (there) {
                group_.direct_ops_.fetch_add(1);
                t.done = m.buffer.bytes;
                finish(t);
            } else {
                c.unreadable.store(with_checksum(t.number + 1), std::memory_order_release);
            }
            c.tail.store(with_checksum(++ends.tail), std::memory_order_release);
            group_.waiter_.wake(m.peer);
            continue;
        }
        if (header.heap_size) {
            now = left;
            ++group_.direct_ops_;
            Offer offer{header.at, header.heap_size, header.heap_fd, 0};
            if (Fault f = group_.reach(m.peer, offer, t.done, now, data)) return f;
        }
        if (now > left || (now == 0 && left > 0)) {
            damaged_ = m.peer;
            return {};
        }
        result.copy(m.buffer.data + t.done, data, now);
        if (header.heap_size) {
            // If the sender has given up meanwhile, it may have reused its tensor.
            if (Fault f = group_.peer_failure()) return f;
        }
        t.done += now;
        t.begun = true;
        if (t.done == m.buffer.bytes) finish(t);
        c.tail.store(with_checksum(++ends.tail), std::memory_order_release);
        group_.waiter_.wake(m.peer);
    }
    return {};
}

bool Exchange::any_movable() {
    begin_pass();
    if (std::any_of(transfers_.begin(), transfers_.end(), [this](Transfer& t) { return can_step(t); }))
        return true;
    return !storable().empty();
}

bool Exchange::must_stop(uint64_t deadline_ns, bool deep, Fault& fault) {
    std::vector<int> awaited;
    bool from_any = false;
    auto operation = OpCode::kSend;
    for (const Transfer& t : transfers_) {
        if (t.finished) continue;
        if (t.message.peer >= 0) {
            bool first = awaited.empty() || t.message.peer < awaited.front();
            if (first) operation = t.message.send ? OpCode::kSend : OpCode::kRecv;
            awaited.insert(first ? awaited.begin() : awaited.end(), t.message.peer);
        } else {
            from_any = true;
        }
    }
    if (from_any) {
        // Any rank may send: the wait ends only if all others are gone.
        Fault last;
        int lost = 0;
        std::set<int> dead, left;
        for (int r = 0; r < group_.world_; ++r) {
            if (r == group_.rank_ || !group_.must_stop({r}, ~uint64_t{0}, deep, last, true)) continue;
            ++lost;
            auto& gone =
                group_.segment_->control(r).state.load() == uint32_t(RankState::kFinalized) ? left : dead;
            if (last.code == FaultCode::kPeerLost) gone.insert(last.culprits.begin(), last.culprits.end());
        }
        if (lost > 0 && lost == group_.world_ - 1) {
            // Nobody knows which of them should have sent, unless a process ended before it left.
            if (last.code == FaultCode::kPeerLost) {
                const auto& gone = dead.empty() ? left : dead;
                last.culprits.assign(gone.begin(), gone.end());
                last.detail = dead.empty() ? "finalized" : "process ended";
            }
            fault = group_.deadlock_.ended_by(last);
            return true;
        }
    }
    // If more messages may join, one step of any message ends the wait; else all must be complete. A receive
    // from any rank needs no rank in particular.
    WaitKind kind{static_cast<uint32_t>(operation), joinable_, !attended_.load(std::memory_order_relaxed),
                  joinable_ || awaited.empty()};
    kind.anybody = from_any && kind.any;
    if (kind.anybody) kind.op = static_cast<uint32_t>(OpCode::kRecv);
    std::sort(awaited.begin(), awaited.end());
    awaited.erase(std::unique(awaited.begin(), awaited.end()), awaited.end());
    return group_.must_stop_waiting(awaited, kind, deadline_ns, deep, fault);
}

// A peer that has left would never read what still fits into the ring: reports the failure instead.
Fault Exchange::reach_receivers(uint64_t deadline_ns) {
    for (Transfer& t : transfers_) {
        if (!t.fresh) continue;
        t.fresh = false;
        if (!t.message.send) continue;
        auto state = static_cast<RankState>(group_.segment_->control(t.message.peer).state.load());
        Fault fault;
        if (state != RankState::kHere && group_.must_stop({t.message.peer}, deadline_ns, true, fault)) {
            return group_.break_group(fault);
        }
    }
    return {};
}

Fault Exchange::run(uint64_t deadline_ns, uint64_t return_ns, std::vector<Done>& done) {
    if (group_.is_broken_) return group_.group_fault();
    if (Fault f = group_.peer_failure()) return f;
    if (Fault f = reach_receivers(deadline_ns)) return f;
    Deferred::announced();
    group_.waiter_.tell_core();
    auto beside = [&] {
        return std::any_of(transfers_.begin(), transfers_.end(), [&](const Transfer& t) {
            return t.message.peer >= 0 && group_.waiter_.beside(t.message.peer);
        });
    };
    bool late = false;
    while (!transfers_.empty() && done.empty() && !late && !interrupted_.exchange(false)) {
        Fault fault;
        auto ready = [&] { return any_movable() || interrupted_.load(std::memory_order_relaxed); };
        auto stop = [&](bool deep) {
            late = now_ns() >= return_ns;
            return late || must_stop(deadline_ns, deep, fault);
        };
        if (!group_.waiter_.until(ready, stop, beside)) {
            if (!late) return group_.break_group(fault);
            group_.waiter_.waits_no_longer();
        }
        if (damaged_ >= 0) return group_.damaged(damaged_, "a message");
        begin_pass();
        for (Transfer& t : transfers_) {
            if (!can_step(t)) continue;
            if (damaged_ >= 0)
                return group_.damaged(damaged_, "a message");  // a receive may have no peer yet
            if (t.message.send) {
                step_send(t);
            } else if (Fault f = step_recv(t)) {
                return f;
            }
            if (damaged_ >= 0) return group_.damaged(damaged_, "a message");
            if (t.finished) done.push_back({t.index, t.message.peer, t.fault});
        }
        for (int r : storable()) {
            if (Fault f = store(r)) return f;
            if (damaged_ >= 0) return group_.damaged(damaged_, "a message");
        }
        transfers_.remove_if([](const Transfer& t) { return t.finished; });
    }
    return {};
}

bool Exchange::can_run_at_once(const Message& m) {
    if (group_.is_broken_ || group_.segment_->header().failures.load(std::memory_order_acquire) > 0)
        return false;
    const Group::Ends& ends = group_.ends_[size_t(m.peer)];
    uint64_t chunks = chunks_of(m);
    bool can = false;
    if (m.send) {
        auto state = static_cast<RankState>(group_.segment_->control(m.peer).state.load());
        can = state == RankState::kHere && ends.sent == ends.sends_done && has_room(m.peer, chunks);
    } else {
        can = arrived(m) >= chunks;
    }
    return can && damaged_ < 0;
}

uint64_t Exchange::chunks_of(const Message& m) const {
    uint64_t chunk = group_.segment_->layout().p2p_chunk;
    return std::max<uint64_t>(1, (m.buffer.bytes + chunk - 1) / chunk);
}

uint64_t Exchange::arrived(const Message& m) {
    const Group::Ends& ends = group_.ends_[size_t(m.peer)];
    if (ChunkHeader h; group_.early_.empty() && ends.received == ends.receives_done && front(m.peer, h) &&
                       h.tag == m.tag && fits(m, h.total, h.count, h.dtype) && !h.heap_size)
        return unread(m.peer);
    return 0;
}

bool Exchange::partly_arrived(const Message& m) {
    uint64_t here = arrived(m), chunks = chunks_of(m);
    return here > 0 && here < chunks && chunks <= group_.segment_->layout().p2p_depth;
}

bool Exchange::run_at_once(const Message& m) {
    Transfer t;
    t.message = m;
    Group::Ends& ends = group_.ends_[size_t(m.peer)];
    if (m.send) {
        t.number = ends.sent++;
        step_send(t);
    } else {
        t.number = ends.received++;
        step_recv(t);
    }
    if (!t.finished) group_.damaged(std::max(damaged_, 0), "a message");
    return t.finished && !t.fault;
}

bool Exchange::run_soon(const Message& m) {
    if (m.peer < 0 || (!m.send && !group_.early_.empty())) return false;
    group_.waiter_.tell_core();
    if (!m.send) {
        Deferred::announced();
        auto here = [&] { return unread(m.peer) > 0 || damaged_ >= 0; };
        if (!group_.waiter_.soon(here, [&] { return group_.waiter_.beside(m.peer); })) return false;
        fetch<0>(group_.segment_->chunk(m.peer, group_.rank_, group_.ends_[size_t(m.peer)].tail));
    }
    return can_run_at_once(m) && run_at_once(m);
}

Fault Group::exchange(const std::vector<Message>& messages, uint64_t deadline_ns) {
    if (messages.size() == 1 && single_->run_soon(messages[0])) return {};
    Exchange exchange(*this, false);
    for (const Message& m : messages) exchange.add(m);
    Fault refused;
    while (exchange.unfinished()) {
        std::vector<Exchange::Done> done;
        if (Fault f = exchange.run(deadline_ns, ~uint64_t{0}, done)) return f;
        for (Exchange::Done& d : done) {
            if (d.fault && !refused) refused = d.fault;
        }
    }
    return refused;
}

}  // namespace unicomm::shm
