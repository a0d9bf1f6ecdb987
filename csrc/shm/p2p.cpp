// Point-to-point messages of a Group: one ring of chunks for each ordered pair.
#include <algorithm>
#include <cstring>

#include "core/opcode.hpp"
#include "shm/group.hpp"

namespace unicomm::shm {
namespace {

std::vector<int32_t> both(int a, int b) { return {std::min(a, b), std::max(a, b)}; }

}  // namespace

struct Group::Transfer {
    const Message* message;
    uint64_t number;     // of the message in its channel
    Transfer* after;     // an earlier message of the same channel in this batch, to be finished first
    uint64_t done = 0;   // bytes
    bool begun = false;  // the first chunk (which an empty message has too) is through
    bool finished = false;
    Fault fault{};
};

bool Group::can_step(const Transfer& t) {
    if (t.finished || (t.after && !t.after->finished)) return false;
    if (t.message->send) {
        Channel& c = segment_->channel(rank_, t.message->peer);
        return c.rejected.load(std::memory_order_acquire) == t.number + 1 ||
               c.head.load(std::memory_order_relaxed) - c.tail.load(std::memory_order_acquire) <
                   segment_->layout().p2p_depth;
    }
    Channel& c = segment_->channel(t.message->peer, rank_);
    return c.tail.load(std::memory_order_relaxed) < c.head.load(std::memory_order_acquire);
}

void Group::step(Transfer& t) {
    if (t.message->send) {
        step_send(t);
    } else {
        step_recv(t);
    }
}

void Group::step_send(Transfer& t) {
    const Message& m = *t.message;
    Channel& c = segment_->channel(rank_, m.peer);
    const Layout& l = segment_->layout();
    uint64_t head = c.head.load(std::memory_order_relaxed);
    while (!t.finished) {
        if (c.rejected.load(std::memory_order_acquire) == t.number + 1) {
            t.fault = {FaultCode::kMismatch, both(rank_, m.peer), {}, "the receiver's tensor differs"};
            t.finished = true;
            return;
        }
        if (head - c.tail.load(std::memory_order_acquire) >= l.p2p_depth) return;
        auto* header = reinterpret_cast<ChunkHeader*>(segment_->chunk(rank_, m.peer, head));
        uint64_t now = std::min<uint64_t>(l.p2p_chunk, m.piece.bytes - t.done);
        header->message = t.number;
        header->total = m.piece.bytes;
        header->count = m.count;
        header->dtype = static_cast<uint32_t>(m.dtype);
        header->bytes = static_cast<uint32_t>(now);
        if (now) std::memcpy(header + 1, m.piece.data + t.done, now);
        c.head.store(++head, std::memory_order_release);
        waiter_.wake_others();
        t.done += now;
        t.begun = true;
        t.finished = t.done == m.piece.bytes;
    }
}

void Group::step_recv(Transfer& t) {
    const Message& m = *t.message;
    Channel& c = segment_->channel(m.peer, rank_);
    uint64_t tail = c.tail.load(std::memory_order_relaxed);
    while (!t.finished && tail < c.head.load(std::memory_order_acquire)) {
        auto* header = reinterpret_cast<ChunkHeader*>(segment_->chunk(m.peer, rank_, tail));
        if (header->message == t.number) {
            if (!t.begun && (header->total != m.piece.bytes || header->count != m.count ||
                             header->dtype != static_cast<uint32_t>(m.dtype))) {
                Claim theirs{m.peer, uint32_t(OpCode::kSend), header->dtype, 0, rank_, header->count, 0};
                Claim mine{rank_, uint32_t(OpCode::kRecv), uint32_t(m.dtype), 0, m.peer, m.count, 0};
                t.fault = {
                    FaultCode::kMismatch, both(rank_, m.peer), {theirs, mine}, "the sender's tensor differs"};
                t.finished = true;
                c.rejected.store(t.number + 1, std::memory_order_release);
                waiter_.wake_others();
                return;
            }
            uint64_t now = std::min<uint64_t>(header->bytes, m.piece.bytes - t.done);
            if (now) std::memcpy(m.piece.data + t.done, header + 1, now);
            t.done += now;
            t.begun = true;
            t.finished = t.done == m.piece.bytes;
        }
        // else: the rest of a message that was refused
        c.tail.store(++tail, std::memory_order_release);
        waiter_.wake_others();
    }
}

Fault Group::await_message(uint64_t deadline_ns, int& source) {
    if (is_broken_) return why_broken();
    source = -1;
    auto ready = [&] {
        for (int r = 0; r < world_ && source < 0; ++r) {
            Channel& c = segment_->channel(r, rank_);
            uint64_t tail = c.tail.load(std::memory_order_relaxed);
            while (source < 0 && tail < c.head.load(std::memory_order_acquire)) {
                auto* header = reinterpret_cast<ChunkHeader*>(segment_->chunk(r, rank_, tail));
                if (header->message >= ends_[size_t(r)].received) {
                    source = r;
                } else {  // the rest of a message that was refused
                    c.tail.store(++tail, std::memory_order_release);
                    waiter_.wake_others();
                }
            }
        }
        return source >= 0;
    };
    Fault fault;
    auto stop = [&](bool deep) {
        // Any rank may be the one that sends: only when all are gone is there nobody to wait for.
        std::vector<int> others;
        for (int r = 0; r < world_; ++r) {
            if (r != rank_) others.push_back(r);
        }
        Fault last;
        size_t lost = 0;
        for (int r : others) lost += must_stop({r}, ~uint64_t{0}, deep, last);
        if (aborted_ || (lost == others.size() && lost > 0)) {
            fault = last;
            return true;
        }
        return must_stop({}, deadline_ns, false, fault);
    };
    if (!waiter_.until(ready, stop)) return break_off(fault);
    return {};
}

Fault Group::exchange(const std::vector<Message>& messages, uint64_t deadline_ns) {
    if (is_broken_) return why_broken();
    if (Fault f = given_up()) return f;
    std::vector<Transfer> transfers;
    transfers.reserve(messages.size());
    for (const Message& m : messages) {
        Ends& ends = ends_[size_t(m.peer)];
        Transfer t{&m, m.send ? ends.sent++ : ends.received++, nullptr};
        for (auto it = transfers.rbegin(); it != transfers.rend() && !t.after; ++it) {
            if (it->message->send == m.send && it->message->peer == m.peer) t.after = &*it;
        }
        transfers.push_back(t);
    }
    // A peer that left would never read what still fits into the ring: say so instead.
    for (const Message& m : messages) {
        auto state = static_cast<RankState>(segment_->control(m.peer).state.load());
        if (m.send && state != RankState::kHere) {
            Fault fault;
            if (must_stop({m.peer}, deadline_ns, true, fault)) return break_off(fault);
        }
    }
    auto movable = [&] {
        return std::any_of(transfers.begin(), transfers.end(),
                           [&](const Transfer& t) { return can_step(t); });
    };
    auto unfinished = [&] {
        return std::any_of(transfers.begin(), transfers.end(), [](const Transfer& t) { return !t.finished; });
    };
    while (unfinished()) {
        Fault fault;
        auto stop = [&](bool deep) {
            std::vector<int> awaited;
            for (const Transfer& t : transfers) {
                if (!t.finished) awaited.push_back(t.message->peer);
            }
            std::sort(awaited.begin(), awaited.end());
            awaited.erase(std::unique(awaited.begin(), awaited.end()), awaited.end());
            return must_stop(awaited, deadline_ns, deep, fault);
        };
        if (!waiter_.until(movable, stop)) return break_off(fault);
        for (Transfer& t : transfers) {
            if (can_step(t)) step(t);
        }
    }
    for (const Transfer& t : transfers) {
        if (t.fault) return t.fault;
    }
    return {};
}

}  // namespace unicomm::shm
