// The rounds of a Group, its waits and its failures.
#include "shm/group.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <type_traits>

#include "base/clock.hpp"
#include "base/hash.hpp"
#include "shm/p2p.hpp"
#include "shm/waiting/deferred.hpp"

namespace unicomm::shm {
namespace {

constexpr size_t kTold = 64 * std::extent_v<decltype(RankControl::culprits)>;  // ranks that a fault can name
constexpr uint64_t kSignalsNs = 100000000;  // between two checks for signals
std::atomic<SignalCheck> signal_check{nullptr};
constexpr uint64_t kDirectBytes = 64 * 1024;  // below, the extra round costs more than the staging copy

constexpr uint64_t kEndsNs = 1000000000;  // from the end of a process' files to that of the process, at most
constexpr uint64_t kReadBytes = 4 * 1024 * 1024;  // from another process, between two looks at the ranks

uint32_t offer_tag(uint64_t round) { return uint32_t(with_checksum(round + 1) >> 32) | 1; }

uint32_t pack(const Op& op) { return op.code | uint32_t(op.dtype) << 16 | uint32_t(op.red) << 24; }

Claim claim_of(int rank, const Announcement& a) {
    return {
        rank,   a.op_dtype_red & 0xffff, (a.op_dtype_red >> 16) & 0xff, a.op_dtype_red >> 24, a.root, a.count,
        a.extra};
}

}  // namespace

void set_signal_check(SignalCheck check) { signal_check = check; }

uint64_t Op::signature() const {
    uint64_t h = mix(0, pack(*this));
    h = mix(h, static_cast<uint32_t>(root));
    h = mix(h, count);
    return mix(h, extra);
}

namespace {

// Another process wrote the number of ranks into the segment.
int checked_rank(Segment& segment, int rank, size_t ranks) {
    int world = segment.layout().world;
    if (size_t(world) == ranks && rank >= 0 && rank < world) return rank;
    throw SystemFailure("the segment is for " + std::to_string(world) + " ranks, not for rank " +
                        std::to_string(rank) + " of " + std::to_string(ranks));
}

}  // namespace

Group::Group(std::shared_ptr<Segment> segment, int rank, const std::vector<int>& pids,
             const std::string& name)
    : segment_(std::move(segment)),
      rank_(checked_rank(*segment_, rank, pids.size())),
      world_(segment_->layout().world),
      watch_(pids),
      waiter_(*segment_, rank),
      culprit_finder_(*segment_, rank),
      deadlock_(*segment_, rank, name),
      pids_(pids),
      heaps_(static_cast<size_t>(world_)),
      readers_(static_cast<size_t>(world_)),
      factors_(static_cast<size_t>(world_)),
      ends_(static_cast<size_t>(world_)),
      single_(std::make_unique<Exchange>(*this, false)) {
    RankControl& me = segment_->control(rank_);
    me.pid = static_cast<uint32_t>(pids[static_cast<size_t>(rank)]);
    me.fault_rank = -1;
    me.wait_table = deadlock_.table().id;
    me.wait_table_fd = deadlock_.table().fd;
    waiter_.at_end([this] { deadlock_.wait_ended(); });
    me.state.store(static_cast<uint32_t>(RankState::kHere));
}

Group::~Group() = default;

std::vector<int> Group::dead_ranks() const {
    std::vector<int> dead;
    for (int r = 0; r < world_; ++r) {
        if (r != rank_ && watch_.dead(r)) dead.push_back(r);
    }
    return dead;
}

Fault Group::break_group(Fault fault) {
    std::lock_guard lock(fault_mutex_);
    if (broken_) return broken_;
    broken_ = fault;
    RankControl& me = segment_->control(rank_);
    me.fault.store(static_cast<uint32_t>(fault.code));
    me.fault_rank.store(fault.culprits.empty() ? -1 : fault.culprits.front());
    for (int r : fault.culprits) {
        if (r >= 0 && size_t(r) < kTold) me.culprits[r / 64].fetch_or(uint64_t{1} << r % 64);
    }
    // Counted first: whoever sees the state looks there, and a rank that is killed in between is one that
    // died.
    segment_->header().failures.fetch_add(1);
    me.state.store(static_cast<uint32_t>(RankState::kFailed));
    is_broken_ = true;
    waiter_.wake_others();
    return fault;
}

Fault Group::group_fault() {
    std::lock_guard lock(fault_mutex_);
    return broken_;
}

void Group::abort() {
    aborted_ = true;  // before the fault is set, because it ends a wait of this rank
    break_group({FaultCode::kAborted, {rank_}, {}, "aborted by this rank"});
    RankControl& me = segment_->control(rank_);
    me.doorbell.fetch_add(1);
    waiter_.wake_others();
}

void Group::give_up(FaultCode code, const std::vector<int>& culprits) {
    break_group({code, culprits, {}, ""});
    abort();  // keeps the fault, and ends a wait of this rank
}

void Group::expect_slow(double seconds) {
    double us = double(now_ns()) / 1e3 + seconds * 1e6;
    constexpr double kMost = double(uint64_t{1} << (kNumberBits - 1));
    segment_->control(rank_).patience_us.store(with_checksum(static_cast<uint64_t>(std::min(us, kMost))));
}

uint64_t Group::patience_ns() const {
    uint64_t until = 0;
    for (int r = 0; r < world_; ++r) {
        uint64_t us = 0;
        if (read_checksummed(segment_->control(r).patience_us.load(), us)) until = std::max(until, us * 1000);
    }
    return until;
}

void Group::finalize() {
    RankControl& me = segment_->control(rank_);
    uint32_t here = static_cast<uint32_t>(RankState::kHere);
    me.state.compare_exchange_strong(here, static_cast<uint32_t>(RankState::kFinalized));
    waiter_.wake_others();
}

Fault Group::lost(const std::vector<int>& ranks) {
    if (is_broken_) return group_fault();
    Fault fault;
    if (must_stop({}, ~uint64_t{0}, false, fault, true)) return break_group(fault);
    std::vector<int> dead;
    std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(dead), [this](int r) { return killed(r); });
    return dead.empty() ? Fault{} : break_group({FaultCode::kPeerLost, dead, {}, "process ended"});
}

std::vector<int> Group::left(const std::vector<int>& ranks) {
    std::vector<int> left;
    std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(left), [this](int r) {
        return static_cast<RankState>(segment_->control(r).state.load()) == RankState::kFinalized;
    });
    return left;
}

Fault Group::await(const std::function<bool()>& ready, const std::function<std::vector<int>()>& awaited,
                   uint64_t deadline_ns, const WaitKind* kind) {
    if (is_broken_) return group_fault();
    Fault fault;
    auto stop = [&](bool deep) {
        if (kind) return must_stop_waiting(awaited(), *kind, deadline_ns, deep, fault);
        return must_stop(awaited(), deadline_ns, deep, fault) || (deep && interrupted(fault));
    };
    return waiter_.until(ready, stop) ? Fault{} : break_group(fault);
}

bool Group::relayed_failure(Fault& fault) {
    if (segment_->header().failures.load() == 0) return false;
    for (int r = 0; r < world_; ++r) {
        RankControl& c = segment_->control(r);
        if (r == rank_ || static_cast<RankState>(c.state.load()) != RankState::kFailed) continue;
        auto code = static_cast<FaultCode>(c.fault.load());
        if (code <= FaultCode::kNone || code > FaultCode::kDeadlock) code = FaultCode::kInternal;
        std::vector<int> culprits;
        for (int other = 0; other < std::min(world_, int(kTold)); ++other) {
            if (c.culprits[other / 64].load() >> other % 64 & 1) culprits.push_back(other);
        }
        // Never trust a number that another process wrote.
        int first = c.fault_rank.load();
        if (culprits.empty()) culprits = {first < 0 || first >= world_ ? r : first};
        auto state = static_cast<RankState>(segment_->control(culprits.front()).state.load());
        bool left = code == FaultCode::kPeerLost && state == RankState::kFinalized;
        fault = {code, culprits, {}, left ? "finalized" : "rank " + std::to_string(r) + " gave up", r};
        return true;
    }
    return false;
}

bool Group::killed(int rank) {
    if (rank == rank_ || !watch_.dead(rank)) return false;
    // Read after the end of the process: before it, the rank may still have had to finalize.
    auto state = static_cast<RankState>(segment_->control(rank).state.load());
    return state != RankState::kFinalized && state != RankState::kFailed;
}

bool Group::must_stop(const std::vector<int>& awaited, uint64_t deadline_ns, bool deep, Fault& fault,
                      bool only_awaited) {
    if (aborted_) {
        fault = {FaultCode::kAborted, {rank_}, {}, "aborted by this rank"};
        return true;
    }
    // Dead ranks come first: they are usually why another rank failed, so they are named.
    Fault relayed;
    bool failed = relayed_failure(relayed);
    int left = -1;
    for (int r : awaited) {
        auto state = static_cast<RankState>(segment_->control(r).state.load());
        if (state == RankState::kFinalized && left < 0) left = r;
    }
    if (deep || failed || left >= 0) {
        // A rank that has already done its part is looked at as well: whoever waits, waits for a rank that
        // may never come to a communicator without that one.
        std::vector<int> dead;
        for (int r = 0; r < world_; ++r) {
            bool counts =
                failed || !only_awaited || std::find(awaited.begin(), awaited.end(), r) != awaited.end();
            if (counts && killed(r)) dead.push_back(r);
        }
        if (!dead.empty()) {
            fault = {FaultCode::kPeerLost, dead, {}, "process ended"};
            return true;
        }
    }
    // A failure comes before a rank that left: a rank that was told of the failure may have left after it.
    if (failed) {
        fault = relayed;
        return true;
    }
    if (left >= 0) {
        fault = {FaultCode::kPeerLost, {left}, {}, "finalized"};
        return true;
    }
    if (uint64_t now = now_ns(); now >= deadline_ns && now >= patience_ns()) {
        // This rank may have been stopped since it looked for a failure, and the others have told one.
        if (relayed_failure(relayed)) return must_stop(awaited, deadline_ns, deep, fault, only_awaited);
        fault = {FaultCode::kTimeout, awaited, {}, ""};
        return true;
    }
    return false;
}

bool Group::interrupted(Fault& fault) {
    SignalCheck check = signal_check.load();
    uint64_t now = now_ns();
    if (!check || now < signals_at_ns_) return false;
    signals_at_ns_ = now + kSignalsNs;
    if (!check()) return false;
    fault = {FaultCode::kAborted, {rank_}, {}, "interrupted"};
    return true;
}

bool Group::must_stop_waiting(const std::vector<int>& awaited, const WaitKind& kind, uint64_t deadline_ns,
                              bool deep, Fault& fault) {
    if (must_stop(awaited, deadline_ns, deep, fault)) {
        if (fault.code == FaultCode::kTimeout && fault.culprits == awaited) {
            fault.culprits = kind.anybody ? culprit_finder_.responsible_for_any(rank_)
                                          : culprit_finder_.responsible(awaited);
            if (fault.culprits.empty()) relayed_failure(fault);  // all others have since given up
        }
        if (!aborted_) fault = deadlock_.ended_by(fault);
        return true;
    }
    if (!deep) return false;
    if (interrupted(fault)) return true;
    culprit_finder_.note_look(awaited, kind.anybody, kind.aside);
    if (!kind.anybody) return deadlock_.check(awaited, kind, fault);
    std::vector<int> others;
    for (int r = 0; r < world_; ++r) {
        if (r != rank_) others.push_back(r);
    }
    WaitKind of_any = kind;
    of_any.any = true;
    return deadlock_.check(others, of_any, fault);
}

Fault Group::peer_failure() {
    if (segment_->header().failures.load(std::memory_order_acquire) == 0) return {};
    Fault fault;
    return must_stop({}, ~uint64_t{0}, false, fault) ? break_group(fault) : Fault{};
}

Fault Group::damaged(int rank, const char* what) {
    return break_group({FaultCode::kInternal,
                        {rank},
                        {},
                        std::string("the shared memory was damaged: ") + what + " of rank " +
                            std::to_string(rank) + ", by a stray write of some process"});
}

// A rank that waits for a round is in it or about to enter it. The other ranks are at most one round ahead,
// which is announced in the other slot. So the slot shows this round, or the one before the last.
Fault Group::await_round(const Op& op, uint64_t round, int only) {
    int first = only < 0 ? 0 : only, last = only < 0 ? world_ : only + 1;
    uint64_t expected = with_checksum(round), before = round < 2 ? 0 : with_checksum(round - 2);
    for (int r = first; r < last; ++r) {
        const Announcement& theirs = segment_->announcement(r, round);
        const Shared<uint64_t>& there = theirs.round;
        if (there.load(std::memory_order_acquire) != expected) {
            Fault fault;
            int odd = -1;
            auto ready = [&] { return there.load(std::memory_order_acquire) == expected; };
            auto stop = [&](bool deep) {
                std::vector<int> awaited;
                for (int p = first; p < last; ++p) {
                    uint64_t now = segment_->announcement(p, round).round.load();
                    if (now == expected) continue;
                    awaited.push_back(p);
                    if (now != before) odd = p;
                }
                if (odd >= 0) return true;
                if (!must_stop_waiting(awaited, {op.code}, op.deadline_ns, deep, fault)) return false;
                if (fault.code != FaultCode::kPeerLost) return true;
                // A rank that was missing may since have announced the round, returned and finalized. It is
                // not lost, and the next look does not await it.
                return !std::all_of(fault.culprits.begin(), fault.culprits.end(), [&](int p) {
                    return std::find(awaited.begin(), awaited.end(), p) != awaited.end() &&
                           segment_->announcement(p, round).round.load() == expected;
                });
            };
            auto beside = [&] {
                for (int p = r; p < last; ++p) {
                    if (segment_->announcement(p, round).round.load(std::memory_order_relaxed) != expected &&
                        waiter_.beside(p))
                        return true;
                }
                return false;
            };
            if (!waiter_.until(ready, stop, beside))
                return odd >= 0 ? damaged(odd, "the round") : break_group(fault);
        }
        // A rank called another operation after the first round.
        if (agreed_ && theirs.signature != agreed_) return damaged(r, "the signature");
    }
    return {};
}

Fault Group::next_round(const Op& op) {
    if (is_broken_) return group_fault();
    Fault fault = await_round(op, round_, -1);
    if (!fault) ++round_;
    return fault;
}

void Group::publish(const Op& op, uint64_t longest) {
    Announcement& mine = segment_->announcement(rank_, round_);
    mine.signature = signature_ = op.signature();
    mine.factor = op.factor;
    mine.count = op.count;
    mine.extra = op.extra;
    mine.op_dtype_red = pack(op);
    mine.root = op.root;
    mine.longest = longest;
    mine.offered = offer_ ? offer_tag(round_) : 0;
    if (offer_) {
        Offer offer = offer_of(offer_);
        std::memcpy(mine.inline_data, &offer, sizeof offer);
        offer_ = nullptr;
    }
    waiter_.tell_core();
    mine.round.store(with_checksum(round_), std::memory_order_release);
    waiter_.wake_others();
}

Fault Group::await_all(const Op& op) { return await_round(op, round_, -1); }

Fault Group::agree() {
    uint64_t mine = signature_;
    bool same = true;
    offers_ = 0;
    for (int r = 0; r < world_; ++r) {
        const Announcement& a = segment_->announcement(r, round_);
        same &= a.signature == mine;
        uint32_t offered = a.offered;
        if (offered != 0 && offered != offer_tag(round_)) return damaged(r, "the offer");
        offers_ += offered != 0;
    }
    if (same) {
        agreed_ = mine;
        return {};
    }
    Fault fault{FaultCode::kMismatch, {}, {}, ""};
    std::map<uint64_t, int> votes;
    for (int r = 0; r < world_; ++r) {
        const Announcement& a = segment_->announcement(r, round_);
        ++votes[a.signature];
        fault.claims.push_back(claim_of(r, a));
    }
    int most = 0, holders = 0;
    uint64_t winner = 0;
    for (auto& [signature, n] : votes) {
        if (n > most) most = n, holders = 0, winner = signature;
        holders += n == most;
    }
    for (int r = 0; r < world_; ++r) {
        bool minority = segment_->announcement(r, round_).signature != winner;
        if (minority || holders > 1) fault.culprits.push_back(r);  // a tie: no side is right
    }
    return fault;
}

Fault Group::first_round(const Op& op, uint64_t longest) {
    if (Fault f = peer_failure()) return f;
    agreed_ = 0;
    publish(op, longest);
    Deferred::announced();
    if (Fault f = await_all(op)) return f;
    return agree();
}

const char* Group::offerable(const char* data, uint64_t bytes) {
    return bytes >= kDirectBytes && Heap::holds(data, bytes) ? data : nullptr;
}

// The parts must be adjacent, as all ranks assume. The result may overwrite only the own part, which no other
// rank reads.
const char* Group::offerable(const std::vector<Buffer>& parts) {
    const char *begin = parts[0].data, *end = begin;
    for (const Buffer& p : parts) {
        if (p.data != end && p.bytes) return nullptr;
        end += p.bytes;
    }
    return offerable(begin, uint64_t(end - begin));
}

Offer Group::offer_of(const char* data) {
    Heap& heap = Heap::mine();
    Offer offer{heap.offset(data), heap.size(), heap.fd(), 0};
    offer.checksum = offer.expected_checksum();
    return offer;
}

Fault Group::locate(int rank, uint64_t offset, uint64_t bytes, const char*& data) {
    Offer offer;
    std::memcpy(&offer, segment_->announcement(rank, round_).inline_data, sizeof offer);
    if (offer.checksum != offer.expected_checksum()) return damaged(rank, "the offer");
    return reach(rank, offer, offset, bytes, data);
}

bool Group::is_ending(int rank) const {
    const uint64_t end = now_ns() + kEndsNs;
    while (!watch_.dead(rank)) {
        if (now_ns() > end) return false;
        usleep(1000);
    }
    return true;
}

Fault Group::reach(int rank, const Offer& offer, uint64_t offset, uint64_t bytes, const char*& data) {
    size_t r = size_t(rank);
    const char* base = nullptr;
    uint64_t size = 0;
    if (pids_[r] == pids_[size_t(rank_)]) {
        base = Heap::mine().base(), size = Heap::mine().size();
    } else {
        try {
            if (!heaps_[r])
                heaps_[r] = std::make_unique<PeerHeap>(pids_[r], int(offer.heap_fd), offer.heap_size);
        } catch (const SystemFailure& failure) {
            Fault fault;
            if (is_ending(rank) && must_stop({rank}, ~uint64_t{0}, true, fault)) return break_group(fault);
            return break_group(
                {FaultCode::kInternal, {failure.is_want() ? rank_ : rank}, {}, failure.what()});
        }
        base = heaps_[r]->base(), size = heaps_[r]->size();
    }
    // Never trust what another process wrote.
    if (offer.at > size || offset > size - offer.at || bytes > size - offer.at - offset) {
        return break_group({FaultCode::kInternal, {rank}, {}, "a tensor outside of its heap was offered"});
    }
    data = base + offer.at + offset;
    return {};
}

void Group::offer_memory(std::vector<Proof> proofs, const std::vector<int>& readers) {
    if (proofs.size() != size_t(world_)) throw SystemFailure("the proofs are not those of all ranks");
    proofs_ = std::move(proofs);
    for (int r : readers) readers_.at(size_t(r)) = true;
}

// A rank that gives up says so before its call returns, and only then may its memory change or go. And the
// pid belongs to the peer while the peer lives and has its proof. So what counts is what is known after the
// read.
Fault Group::read_in(int rank, uint64_t at, Buffer to, bool& there) {
    there = true;
    for (uint64_t done = 0; done < to.bytes && there; done += kReadBytes) {
        simulation::point("read");
        uint64_t now = std::min(kReadBytes, to.bytes - done);
        int pid = pids_[size_t(rank)];
        there = !proofs_.empty() && read_memory(pid, at + done, to.data + done, now) == now &&
                can_read(pid, proofs_[size_t(rank)]);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        Fault fault;
        if (watch_.dead(rank) || aborted_) {
            if (!must_stop({rank}, ~uint64_t{0}, true, fault, true))
                fault = {FaultCode::kPeerLost, {rank}, {}, "process ended"};
            return break_group(fault);
        }
        if (Fault f = peer_failure()) return f;
    }
    return {};
}

Fault Group::leave(const Op& op, int awaited) {
    // A rank that has given up may have reused its tensor since, so the data that were read may be wrong.
    if (Fault f = peer_failure()) return f;
    if (Fault f = next_round(op)) return f;
    publish(op, 0);
    return awaited == rank_ ? Fault{} : await_round(op, round_, awaited);
}

uint64_t Group::place(uint64_t span) const {
    uint64_t room = segment_->layout().slot_bytes;
    if (span == 0 || span > room / 2) return 0;
    uint64_t stride = (span + 4095) / 4096 * 4096;
    return (round_ / 2) % (room / stride) * stride;
}

char* Group::staging(bool in_line, uint64_t span) {
    return in_line ? segment_->announcement(rank_, round_).inline_data
                   : segment_->slot(rank_, round_) + place(span);
}

const char* Group::staged(int rank, bool in_line, uint64_t span) {
    return in_line ? segment_->announcement(rank, round_).inline_data
                   : segment_->slot(rank, round_) + place(span);
}

uint64_t Group::longest_of_all() {
    uint64_t longest = 0;
    for (int r = 0; r < world_; ++r) longest = std::max(longest, segment_->announcement(r, round_).longest);
    return longest;
}

}  // namespace unicomm::shm
