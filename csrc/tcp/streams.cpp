#include "tcp/streams.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "base/error.hpp"

namespace unicomm::tcp {
namespace {

using transport::Failure;
using transport::kAnyRank;

constexpr uint8_t kMark[3] = {'u', 'c', '1'};
constexpr size_t kAtOnce = 1 << 20;   // bytes that one read takes at most, so that all connections get on
constexpr size_t kNowhere = 1 << 16;  // bytes of what is thrown away, that are read at once
constexpr int kUnread = 256;          // such reads at the end
constexpr int kFew = 4;               // connections
constexpr int kEvents = 64;           // that one look takes
constexpr uint32_t kReading = EPOLLIN | EPOLLRDHUP | EPOLLET;

uint64_t what_of(Kind kind, uint32_t tag) { return uint64_t(kind) << 32 | tag; }

// What is left of a message of which `done` bytes have been written. Returns how many parts that are.
size_t rest_of(iovec* parts, size_t done, const void* head, size_t head_bytes, const void* data,
               size_t bytes) {
    size_t n = 0;
    if (done < head_bytes) {
        parts[n++] = {const_cast<char*>(static_cast<const char*>(head)) + done, head_bytes - done};
        done = head_bytes;
    }
    done -= head_bytes;
    if (done < bytes) parts[n++] = {const_cast<char*>(static_cast<const char*>(data)) + done, bytes - done};
    return n;
}

}  // namespace

Streams::Streams(int rank, int size, uint64_t spin_ns)
    : Transport(rank, size, spin_ns), peers_(size_t(size)), few_(size <= kFew + 1) {
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_ < 0) throw_errno("epoll_create1");
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u32 = uint32_t(size_);
    try {
        if (epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event) != 0) throw_errno("epoll_ctl");
    } catch (...) {
        drop();
        throw;
    }
}

void Streams::connect(const std::vector<int>& connections) {
    for (int rank = 0; rank < size_; ++rank) {
        if (rank != rank_) peer_of(rank).file = connections.at(size_t(rank));
    }
    try {
        for (int rank = 0; rank < size_; ++rank) {
            if (rank == rank_) continue;
            Peer& p = peer_of(rank);
            const int flags = fcntl(p.file, F_GETFL), yes = 1, never = 0;
            // Other kinds of sockets have neither. A rank that does not read for a while is no reason for an
            // end: the system would count its full buffers as silence. Dead hosts are found by other
            // connections.
            setsockopt(p.file, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
            setsockopt(p.file, IPPROTO_TCP, TCP_USER_TIMEOUT, &never, sizeof never);
            p.ahead = std::make_unique_for_overwrite<char[]>(kAhead);
            p.readable = true;
            epoll_event event{};
            event.events = kReading;
            event.data.u32 = uint32_t(rank);
            if (flags < 0 || fcntl(p.file, F_SETFL, flags | O_NONBLOCK) < 0 ||
                epoll_ctl(epoll_, EPOLL_CTL_ADD, p.file, &event) != 0) {
                throw_errno("a connection cannot be watched");
            }
        }
    } catch (...) {
        drop();
        throw;
    }
}

// --- sending ----------------------------------------------------------------------------------------------

Request* Streams::send(int peer, const void* data, size_t bytes, Kind kind, uint32_t tag) {
    check_connected(peer);
    Request* request = begin(peer, true);
    Peer& p = peer_of(peer);
    const Head head{bytes, tag, uint8_t(kind), {kMark[0], kMark[1], kMark[2]}};
    p.sends.push_back({request, head, static_cast<const char*>(data), 0});
    request->under_way = true;
    ++unsent_;
    if (!p.full && p.sends.size() == 1) write(peer);
    return request;
}

// Gives the system what it takes. Returns whether the connection has ended meanwhile.
bool Streams::write(int rank) {
    Peer& p = peer_of(rank);
    while (!p.sends.empty()) {
        Sending& s = p.sends.front();
        iovec parts[2];
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = rest_of(parts, s.sent, &s.head, sizeof s.head, s.data, s.head.bytes);
        const ssize_t n = sendmsg(p.file, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno != EAGAIN && errno != ENOBUFS) {
            unsent_ -= p.sends.size();
            p.sends.clear();
            p.readable = p.ending = true;  // what the rank sent before can still be read
            broke(rank, std::strerror(errno));
            return true;
        }
        if (n > 0) s.sent += size_t(n);
        if (s.sent < sizeof s.head + s.head.bytes) {
            p.full = true;
            watch(rank, true);
            return false;
        }
        finish(*s.request);
        p.sends.pop_front();
        --unsent_;
    }
    return false;
}

// --- receiving --------------------------------------------------------------------------------------------

Request* Streams::receive(int peer, void* data, size_t bytes, Kind kind, uint32_t tag) {
    Request* request = begin(peer, false);
    const Receiving receiving{request, static_cast<char*>(data), bytes, what_of(kind, tag), order_++};
    request->under_way = true;
    if (peer != kAnyRank) {
        if (!take_early(peer, receiving)) peer_of(peer).receives.push_back(receiving);
        return request;
    }
    int first = kAnyRank;  // the rank whose message came first
    uint64_t order = ~uint64_t{0};
    for (int rank = 0; rank < size_; ++rank) {
        for (const Early& early : peer_of(rank).early) {
            if (early.what != receiving.what) continue;
            if (early.order < order) first = rank, order = early.order;
            break;
        }
    }
    if (first == kAnyRank) {
        from_any_.push_back(receiving);
    } else {
        take_early(first, receiving);
    }
    return request;
}

// A receive has found its message, whose bytes may still come.
void Streams::give(const Receiving& receiving, int rank, size_t length) {
    receiving.request->peer = rank;
    receiving.request->length = length;
    receiving.request->cut = length > receiving.bytes;
}

// Gives a receive the first early message of the rank that matches it, if there is one.
bool Streams::take_early(int rank, const Receiving& receiving) {
    Peer& p = peer_of(rank);
    auto found = std::find_if(p.early.begin(), p.early.end(),
                              [&](const Early& early) { return early.what == receiving.what; });
    if (found == p.early.end()) return false;
    give(receiving, rank, found->bytes);
    char* const to = receiving.request->cut ? nullptr : receiving.data;
    const size_t there = found->whole ? found->bytes : p.got;
    if (to != nullptr && there != 0) std::memcpy(to, found->data.get(), there);
    if (found->whole) {
        finish(*receiving.request);
    } else {
        p.to = to;
        p.request = receiving.request;
    }
    p.early.erase(found);
    return true;
}

// The head of a message has come: finds its place.
void Streams::start_message(int rank) {
    Peer& p = peer_of(rank);
    const Head& head = p.head;
    if (std::memcmp(head.mark, kMark, sizeof kMark) != 0) {
        p.ended = true;
        broke(rank, "it sent something that is no message");
        check_connected(rank);
    }
    p.got = 0;
    p.to = nullptr;
    p.request = nullptr;
    const uint64_t what = what_of(Kind(head.kind), head.tag);
    auto matches = [&](const Receiving& r) { return r.what == what; };
    auto own = std::find_if(p.receives.begin(), p.receives.end(), matches);
    auto any = std::find_if(from_any_.begin(), from_any_.end(), matches);
    const bool of_any = any != from_any_.end() && (own == p.receives.end() || any->order < own->order);
    if (of_any || own != p.receives.end()) {
        const Receiving receiving = of_any ? *any : *own;
        if (of_any)
            from_any_.erase(any);
        else
            p.receives.erase(own);
        give(receiving, rank, head.bytes);
        p.request = receiving.request;
        if (!p.request->cut) p.to = receiving.data;
    } else {
        std::unique_ptr<char[]> memory(new (std::nothrow) char[std::max<size_t>(1, head.bytes)]);
        if (memory == nullptr) {
            failed_ = "no memory for a message of " + std::to_string(head.bytes) + " bytes";
            throw Failure(failed_);
        }
        p.early.push_back({what, order_++, head.bytes, std::move(memory), false});
        p.to = p.early.back().data.get();
    }
    p.in_message = true;
    if (head.bytes == 0) end_message(rank);
}

void Streams::end_message(int rank) {
    Peer& p = peer_of(rank);
    p.in_message = false;
    if (p.request != nullptr) {
        finish(*p.request);
    } else {
        p.early.back().whole = true;
    }
}

void Streams::took(int rank, size_t bytes) {
    Peer& p = peer_of(rank);
    p.got += bytes;
    if (p.got == p.head.bytes) end_message(rank);
}

// Takes the messages in what was read ahead.
void Streams::take_ahead(int rank) {
    Peer& p = peer_of(rank);
    while (p.begin < p.end) {
        const char* const from = p.ahead.get() + p.begin;
        const size_t there = p.end - p.begin;
        if (!p.in_message) {
            if (there < sizeof(Head)) {
                std::memmove(p.ahead.get(), from, there);
                p.begin = 0;
                p.end = there;
                return;
            }
            std::memcpy(&p.head, from, sizeof(Head));
            p.begin += sizeof(Head);
            start_message(rank);
            continue;
        }
        const size_t bytes = std::min<size_t>(there, p.head.bytes - p.got);
        if (p.to != nullptr) std::memcpy(p.to + p.got, from, bytes);
        p.begin += bytes;
        took(rank, bytes);
    }
    p.begin = p.end = 0;
}

// Reads once. Returns whether there may be more.
bool Streams::read(int rank) {
    Peer& p = peer_of(rank);
    char nowhere[kNowhere];
    iovec parts[2];
    int count = 0;
    size_t body = 0;
    bool rest = true;  // of the message
    if (p.in_message) {
        const size_t left = p.head.bytes - p.got;
        body = std::min(left, p.to != nullptr ? kAtOnce : kNowhere);
        rest = body == left;
        parts[count++] = {p.to != nullptr ? p.to + p.got : nowhere, body};
    }
    if (rest) parts[count++] = {p.ahead.get() + p.end, kAhead - p.end};
    const size_t asked = body + (rest ? kAhead - p.end : 0);
    const ssize_t n = readv(p.file, parts, count);
    if (n < 0 && errno == EINTR) return true;
    if (n < 0 && errno == EAGAIN) {
        p.readable = false;
        return false;
    }
    if (n <= 0) {
        lost(rank, n < 0 ? errno : 0);
        return true;
    }
    // A short read has emptied the socket; what comes later is an event.
    p.readable = p.ending || size_t(n) == asked;
    const size_t in_body = std::min(size_t(n), body);
    if (in_body != 0) took(rank, in_body);
    p.end += size_t(n) - in_body;
    take_ahead(rank);
    return true;
}

// Nothing comes any more.
void Streams::lost(int rank, int error) {
    Peer& p = peer_of(rank);
    p.ended = true;
    p.readable = false;
    unsent_ -= p.sends.size();
    p.sends.clear();
    epoll_ctl(epoll_, EPOLL_CTL_DEL, p.file, nullptr);
    broke(rank, error == 0 ? "the connection has ended" : std::strerror(error));
}

// --- what a wait runs -------------------------------------------------------------------------------------

// Asks the system to tell when there is something to read, or also when more can be sent.
void Streams::watch(int rank, bool writable) {
    epoll_event event{};
    event.events = kReading | (writable ? EPOLLOUT : 0u);
    event.data.u32 = uint32_t(rank);
    epoll_ctl(epoll_, EPOLL_CTL_MOD, peer_of(rank).file, &event);
}

void Streams::look(int milliseconds) {
    epoll_event events[kEvents];
    const int count = epoll_wait(epoll_, events, kEvents, milliseconds);
    for (int i = 0; i < count; ++i) {
        const uint32_t told = events[i].events;
        if (events[i].data.u32 == uint32_t(size_)) {
            uint64_t number;
            if (::read(wake_, &number, sizeof number) < 0) continue;
            continue;
        }
        const int rank = int(events[i].data.u32);
        Peer& p = peer_of(rank);
        p.readable = true;
        if (told & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) p.ending = true;
        if (p.full && (told & (EPOLLOUT | EPOLLHUP | EPOLLERR))) {
            p.full = false;
            watch(rank, false);
        }
    }
}

bool Streams::progress() {
    if (!failed_.empty()) throw Failure(failed_);
    if (!few_ || unsent_ != 0) look(0);
    bool more = false;
    for (int rank = 0; rank < size_; ++rank) {
        if (rank == rank_) continue;
        Peer& p = peer_of(rank);
        if (!p.sends.empty() && !p.full) more |= write(rank);
        const bool awaited = p.in_message || !p.receives.empty() || !from_any_.empty();
        if (!p.ended && (p.readable || (few_ && awaited))) more |= read(rank);
    }
    return more;
}

void Streams::sleep(int milliseconds) { look(milliseconds); }

// --- the end ----------------------------------------------------------------------------------------------

// The system sends what it has taken, also after the process has ended, unless something is unread. A rank
// that has given up may have sent what others need of an operation before.
bool Streams::end(bool) {
    char nowhere[kNowhere];
    for (Peer& p : peers_) {
        if (p.file < 0) continue;
        ::shutdown(p.file, SHUT_WR);
        for (int i = 0; i < kUnread && recv(p.file, nowhere, sizeof nowhere, MSG_DONTWAIT) > 0; ++i) continue;
        close(std::exchange(p.file, -1));
    }
    close(std::exchange(epoll_, -1));
    return true;
}

void Streams::abandon(bool forked) {
    epoll_ = forked ? (close(epoll_), -1) : -1;
    for (Peer& p : peers_) {
        if (p.file < 0) continue;
        if (forked) {
            close(std::exchange(p.file, -1));
        } else {
            ::shutdown(p.file, SHUT_RDWR);
        }
    }
}

}  // namespace unicomm::tcp
