// Collectives over a transport's messages.
#include "transport/collectives.hpp"

#include <algorithm>
#include <cstring>
#include <deque>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "reduce/fold.hpp"

namespace unicomm::transport {
namespace {

constexpr uint64_t kForever = ~uint64_t{0};
constexpr size_t kWindow = 4;  // chunks of each rank that are received ahead

size_t count_of(size_t bytes, size_t chunk) { return (bytes + chunk - 1) / chunk; }

std::vector<int> all_ranks(int size) {
    std::vector<int> ranks(static_cast<size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
}

// Waits for the requests, then until all that was sent has left.
Ended finish(Transport& transport, Group& group) {
    Ended ended = transport.wait([&] { return group.over(); }, kForever);
    if (ended != Ended::kDone) return ended;
    if ((ended = transport.flush(kForever)) == Ended::kDone) transport.let_go();
    return ended;
}

}  // namespace

Slots::Slots(std::shared_ptr<Transport> transport)
    : Slots(transport, all_ranks(transport->size()),
            std::max(most(transport->size()), most_for_each(transport->size()))) {}

Slots::Slots(std::shared_ptr<Transport> transport, std::vector<int> members, size_t room)
    : transport_(std::move(transport)), members_(std::move(members)), room_(room), lengths_(members_.size()) {
    me_ = int(std::find(members_.begin(), members_.end(), transport_->rank()) - members_.begin());
    memory_ = transport_->hold_always(members_.size() * (kHead + room_));
}

size_t Slots::write(char* to, const char* head, Piece first, Piece piece) const {
    if (first.bytes + piece.bytes > room_) throw std::invalid_argument("too much for a slot");
    std::memcpy(to, head, kHead);
    if (first.bytes != 0) std::memcpy(to + kHead, first.data, first.bytes);
    if (piece.bytes != 0) std::memcpy(to + kHead + first.bytes, piece.data, piece.bytes);
    return kHead + first.bytes + piece.bytes;
}

void Slots::receive_all() {
    receives_.assign(members_.size(), nullptr);
    sends_.clear();
    for (int step = 1; step < size(); ++step) {
        const size_t from = size_t((me_ - step + size()) % size());
        receives_[from] = transport_->receive(members_[from], slot(int(from)), kHead + room_, Kind::kSlot);
    }
}

void Slots::start_same(const char* head, Piece first, Piece for_all) {
    receive_all();
    const size_t length = lengths_[size_t(me_)] = write(slot(me_), head, first, for_all);
    for (int step = 1; step < size(); ++step) {
        const int to = members_[size_t((me_ + step) % size())];
        sends_.push_back(transport_->send(to, slot(me_), length, Kind::kSlot));
    }
}

void Slots::start(const char* head, Piece first, const std::vector<Piece>& pieces) {
    if (outgoing_ == nullptr) outgoing_ = transport_->hold_always(members_.size() * (kHead + room_));
    receive_all();
    lengths_[size_t(me_)] = write(slot(me_), head, first, pieces[size_t(me_)]);
    for (int step = 1; step < size(); ++step) {
        const size_t to = size_t((me_ + step) % size());
        char* const place = outgoing_ + to * (kHead + room_);
        sends_.push_back(
            transport_->send(members_[to], place, write(place, head, first, pieces[to]), Kind::kSlot));
    }
}

bool Slots::arrived() {
    for (size_t member = 0; member < receives_.size(); ++member) {
        Request*& request = receives_[member];
        if (request == nullptr) continue;
        if (!request->done) return false;
        if (request->cut || request->length < kHead) throw Failure("not a slot");
        lengths_[member] = request->length;
        transport_->release(std::exchange(request, nullptr));
    }
    while (!sends_.empty() && sends_.back()->done) {
        transport_->release(sends_.back());
        sends_.pop_back();
    }
    return sends_.empty();
}

Ended Slots::gather(const char* head, const void* data, size_t bytes) {
    start_same(head, {}, {static_cast<const char*>(data), bytes});
    const Ended ended = transport_->wait([this] { return arrived(); }, kForever);
    return ended == Ended::kDone ? transport_->flush(kForever) : ended;
}

bool Slots::alike() const {
    for (int member = 1; member < size(); ++member) {
        if (std::memcmp(head(member), head(0), kCommon) != 0) return false;
    }
    return true;
}

Ended greet(Transport& transport, uint64_t deadline) {
    char* const memory = transport.hold_always(size_t(transport.size()) + 1);
    // A rank answers others that still connect only while it calls UCX. So it leaves when all others have
    // told it, by a second message, that they got everybody's first one.
    for (int round = 0; round < 2; ++round) {
        Group group(transport);
        for (int peer = 0; peer < transport.size(); ++peer) {
            if (peer == transport.rank()) continue;
            group.add_receive(transport.receive(peer, memory + peer, 1, Kind::kHello, uint32_t(round)), 1);
            group.add_send(transport.send(peer, memory + transport.size(), 1, Kind::kHello, uint32_t(round)));
        }
        const Ended ended = transport.wait([&] { return group.over(); }, deadline);
        if (ended != Ended::kDone) return ended;
    }
    return transport.flush(deadline);
}

// Of the chunks of a collective: where ranks do not compare their calls, those of one of another size go to
// no receive here, though each chunk may be as long as one of ours.
static uint32_t tag_of(size_t bytes) { return uint32_t(bytes ^ bytes >> 32); }

Ended reduce(Transport& transport, const Reduction& r) {
    const int size = transport.size(), me = transport.rank();
    const size_t own = r.shares[size_t(me)].bytes, chunks = count_of(own, r.chunk);
    const size_t ahead = std::min(chunks, kWindow), element = size_t(dtype_bytes(r.dtype));
    char* const scratch = transport.hold(std::max<size_t>(1, size_t(size) * ahead * std::min(own, r.chunk)));
    const size_t place = std::min(own, r.chunk);
    auto at = [&](int rank, size_t chunk) {
        return scratch + (size_t(rank) * ahead + chunk % ahead) * place;
    };
    auto length = [&](size_t bytes, size_t chunk) { return std::min(r.chunk, bytes - chunk * r.chunk); };
    size_t total = 0;
    for (const Share& share : r.shares) total += share.bytes;
    const uint32_t tag = tag_of(total);

    std::vector<Request*> receives(size_t(size) * std::max<size_t>(1, ahead), nullptr);
    auto expect = [&](size_t chunk) {
        for (int step = 1; step < size; ++step) {
            const int from = (me - step + size) % size;
            receives[size_t(from) * ahead + chunk % ahead] =
                transport.receive(from, at(from, chunk), length(own, chunk), Kind::kShare, tag);
        }
    };
    for (size_t chunk = 0; chunk < ahead; ++chunk) expect(chunk);

    // What comes back of another rank's share can only come when that rank has this one's.
    Group others(transport);
    for (int from : r.from) {
        const Share& share = r.shares[size_t(from)];
        for (size_t chunk = 0; chunk < count_of(share.bytes, r.chunk); ++chunk) {
            const size_t bytes = length(share.bytes, chunk);
            others.add_receive(
                transport.receive(from, share.data + chunk * r.chunk, bytes, Kind::kResult, tag), bytes);
        }
    }

    // Shares are sent some chunks ahead, so that folded chunks do not wait behind all of them.
    struct Outgoing {
        size_t next = 0;
        std::deque<Request*> under_way;
    };
    std::vector<Outgoing> outgoing(static_cast<size_t>(size));
    auto send_shares = [&] {
        bool over = true;
        for (int step = 1; step < size; ++step) {
            const int to = (me + step) % size;
            const Share& share = r.shares[size_t(to)];
            Outgoing& out = outgoing[size_t(to)];
            while (!out.under_way.empty() && out.under_way.front()->done) {
                transport.release(out.under_way.front());
                out.under_way.pop_front();
            }
            for (; out.under_way.size() < kWindow && out.next * r.chunk < share.bytes; ++out.next) {
                out.under_way.push_back(transport.send(to, share.data + out.next * r.chunk,
                                                       length(share.bytes, out.next), Kind::kShare, tag));
            }
            over &= out.under_way.empty();
        }
        return over;
    };

    size_t folded = 0;
    int next = 0;  // the rank whose part of the chunk is looked for
    std::vector<const void*> sources(static_cast<size_t>(size));
    auto chunk_is_there = [&] {
        for (; next < size; ++next) {
            if (next == me) continue;
            Request* request = receives[size_t(next) * ahead + folded % ahead];
            if (!request->done) return false;
            Group::check_length(*request, length(own, folded));
            transport.release(request);
        }
        return true;
    };
    auto fold_chunk = [&] {
        const size_t bytes = length(own, folded), place = folded * r.chunk;
        for (int rank = 0; rank < size; ++rank) {
            sources[size_t(rank)] = rank == me ? r.shares[size_t(me)].data + place : at(rank, folded);
        }
        if (!fold(r.dtype, r.red, r.out + place, sources.data(), size, int64_t(bytes / element),
                  r.factors.empty() ? nullptr : r.factors.data(), size)) {
            throw Failure("the reduction is not defined");  // checked before
        }
        for (int to : r.to) others.add_send(transport.send(to, r.out + place, bytes, Kind::kResult, tag));
        if (folded + ahead < chunks) expect(folded + ahead);
        ++folded;
        next = 0;
    };
    Ended ended = transport.wait(
        [&] {
            bool sent = send_shares();
            while (folded < chunks && chunk_is_there()) {
                fold_chunk();
                sent = send_shares();
            }
            return sent && folded == chunks;
        },
        kForever);
    return ended == Ended::kDone ? finish(transport, others) : ended;
}

Ended broadcast(Transport& transport, char* data, size_t bytes, int root, size_t chunk) {
    const int size = transport.size(), me = transport.rank();
    // A share for each rank but the root, in order of ranks after it, cut at whole chunks.
    const size_t all = count_of(bytes, chunk), parts = size_t(size - 1);
    auto first = [&](size_t part) { return all * part / parts; };
    auto rank_of = [&](size_t part) { return int((size_t(root) + 1 + part) % size_t(size)); };
    auto length = [&](size_t c) { return std::min(chunk, bytes - c * chunk); };
    const uint32_t tag = tag_of(bytes);
    Group others(transport);
    if (me == root) {
        // One chunk for each in turn, so that all have something to pass on.
        for (size_t i = 0; i < all; ++i) {
            for (size_t part = 0; part < parts; ++part) {
                const size_t c = first(part) + i;
                if (c >= first(part + 1)) continue;
                others.add_send(
                    transport.send(rank_of(part), data + c * chunk, length(c), Kind::kShare, tag));
            }
            if (i > all / parts + 1) break;
        }
        return finish(transport, others);
    }
    std::vector<Request*> own;
    size_t mine = 0;
    for (size_t part = 0; part < parts; ++part) {
        const bool is_own = rank_of(part) == me;
        if (is_own) mine = part;
        for (size_t c = first(part); c < first(part + 1); ++c) {
            Request* request = transport.receive(is_own ? root : rank_of(part), data + c * chunk, length(c),
                                                 is_own ? Kind::kShare : Kind::kResult, tag);
            if (is_own)
                own.push_back(request);
            else
                others.add_receive(request, length(c));
        }
    }
    for (size_t c = first(mine); c < first(mine + 1); ++c) {
        Request* request = own[c - first(mine)];
        Ended ended = transport.wait([&] { return request->done; }, kForever);
        if (ended != Ended::kDone) return ended;
        Group::check_length(*request, length(c));
        transport.release(request);
        for (size_t part = 0; part < parts; ++part) {
            if (part != mine)
                others.add_send(
                    transport.send(rank_of(part), data + c * chunk, length(c), Kind::kResult, tag));
        }
    }
    return finish(transport, others);
}

}  // namespace unicomm::transport
