// Requests, waiting and the end, which are the same over each engine.
#include "transport/transport.hpp"

#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/bind_fault.hpp"
#include "base/clock.hpp"
#include "base/error.hpp"

namespace unicomm::transport {
namespace {

constexpr uint64_t kSlice = 100;  // milliseconds of sleep, after which signal handlers may run
// While data keeps coming: turns between two looks at the clock, and ns between two at all that ends a wait.
constexpr uint32_t kTurns = 64;
constexpr uint64_t kLook = 50'000'000;

}  // namespace

Transport::Transport(int rank, int size, uint64_t spin_ns) : rank_(rank), size_(size), spin_ns_(spin_ns) {
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_ < 0) throw_errno("eventfd");
}

Transport::~Transport() {
    if (wake_ >= 0) close(wake_);
}

// --- messages ---------------------------------------------------------------------------------------------

Request* Transport::begin(int peer, bool send) {
    if (!is_open()) throw Failure("the communicator has ended");
    if (free_.empty()) free_.push_back(&requests_.emplace_back());
    Request* request = free_.back();
    free_.pop_back();
    *request = {};
    request->transport = this;
    request->peer = peer;
    request->send = send;
    ++events_;
    return request;
}

void Transport::finish(Request& request) {
    request.done = true;
    ++events_;
}

char* Transport::hold(size_t bytes) {
    held_.push_back(std::make_unique_for_overwrite<char[]>(bytes));
    return held_.back().get();
}

char* Transport::hold_always(size_t bytes) {
    always_held_.push_back(std::make_unique_for_overwrite<char[]>(bytes));
    return always_held_.back().get();
}

void Transport::broke(int peer, const std::string& why) {
    broken_.resize(size_t(size_));
    std::string& first = broken_[size_t(peer)];
    if (first.empty()) first = "rank " + std::to_string(peer) + ": " + why;
}

void Transport::check_connected(int peer) const {
    if (!broken_.empty() && !broken_[size_t(peer)].empty()) throw Failure(broken_[size_t(peer)]);
}

// A rank that has left is no failure for those who wait for others.
void Transport::check_broken() const {
    for (const Request& request : requests_) {
        if (request.waits() && request.peer >= 0) check_connected(request.peer);
    }
}

// --- waiting ----------------------------------------------------------------------------------------------

Ended Transport::wait(const std::function<bool()>& done, uint64_t deadline, bool rousable) {
    std::lock_guard lock(waited_in_);
    if (!is_open()) return Ended::kStopped;
    uint64_t hot = 0, look = 0, told = 0;
    uint32_t turns = 0;
    for (;;) {
        // First: what ranks sent before they told of a fault that came later is taken.
        const bool stop = stopped();
        const bool more = progress();
        const uint64_t before = events_;
        if (done()) return Ended::kDone;
        // An engine need not wake who sleeps for a message that was over when `done` began it.
        if (more || (events_ != before && !stop)) {
            if (++turns % kTurns != 0) continue;
            const uint64_t now = now_ns();
            if (now < look) continue;
            look = now + kLook;
            if (stop && told == 0) told = now;
            if (stop && now - told > kStopped) return Ended::kStopped;  // a peer that never ends to send
            if (rousable && !stop && roused_.exchange(false, std::memory_order_acq_rel))
                return Ended::kRoused;
            if (now >= deadline) return Ended::kLate;
            if (signal_has_raised()) return Ended::kSignal;
            continue;
        }
        if (!broken_.empty()) check_broken();
        if (stop) return Ended::kStopped;
        if (rousable && roused_.exchange(false, std::memory_order_acq_rel)) {
            if (stopped()) continue;  // it was the stop that roused it
            return Ended::kRoused;
        }
        const uint64_t now = now_ns();
        if (now >= deadline) return Ended::kLate;
        if (hot == 0) hot = now + spin_ns_;
        if (now < hot) {
            sched_yield();
            continue;
        }
        if (!may_sleep()) continue;
        if (!stopped()) sleep(int(std::min<uint64_t>((deadline - now + 999'999) / 1'000'000, kSlice)));
        if (signal_has_raised()) return Ended::kSignal;
    }
}

Ended Transport::flush(uint64_t deadline) {
    return flushed() ? Ended::kDone : wait([this] { return flushed(); }, deadline);
}

void Transport::stop() {
    stopped_.store(true, std::memory_order_release);
    rouse();
}

void Transport::rouse() {
    roused_.store(true, std::memory_order_release);
    const uint64_t one = 1;
    std::lock_guard lock(waking_);
    if (wake_ >= 0 && write(wake_, &one, sizeof one) < 0) return;  // full: it is awake in any case
}

// --- the end ----------------------------------------------------------------------------------------------

bool Transport::drop() {
    if (!is_open()) return true;  // in a forked child, a thread of the parent may have been in a wait
    const bool given_up = stopped();
    stop();
    std::unique_lock alone(waited_in_, std::chrono::nanoseconds(kLeaves));
    {
        std::lock_guard lock(waking_);
        if (alone && wake_ >= 0) close(std::exchange(wake_, -1));
    }
    if (!is_open()) return true;
    if (!alone) {
        keep_for_ever();
        return false;
    }
    return end(given_up);
}

// The engine may still write to what its requests name, so neither is freed.
void Transport::keep_for_ever(bool forked) {
    abandon(forked);
    new std::deque<Request>(std::move(requests_));
    new std::vector<std::unique_ptr<char[]>>(std::move(held_));
    new std::vector<std::unique_ptr<char[]>>(std::move(always_held_));
}

void Transport::forget() {
    if (is_open()) keep_for_ever(true);
    if (wake_ >= 0) close(std::exchange(wake_, -1));  // without the lock, which another thread may have held
}

}  // namespace unicomm::transport
