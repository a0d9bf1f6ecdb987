// Spins, yields and sleeps; watches processes.
#include "shm/waiting/wait.hpp"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <map>
#include <mutex>
#include <string>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/fork.hpp"
#include "base/simulation.hpp"

namespace unicomm::shm {
namespace {

constexpr uint64_t kYieldNs = 1000000;  // yields this long before it sleeps
constexpr uint64_t kTakenNs = 700000;   // a longer yield gave the core to a foreign process
constexpr int kYields = 16;             // checks after this many yields
constexpr int kCheapYields = 2;         // the first ones: they keep a lock that is held, and may spin again
constexpr long kFewSwitches = 4;        // of kYields: yields do not give this core to the others
constexpr int kNoYields = 50;           // waits that sleep at once if yields do harm; doubled while they do
constexpr int kMostNoYields = 3200;
constexpr uint64_t kFirstSleepNs = 2000000;     // then sleeps, longer each time ...
constexpr uint64_t kLongestSleepNs = 50000000;  // ... but checks peers and the deadline this often
constexpr int kWanted = 100;                    // waits that do not spin after a yield had an effect

void futex_wait(Shared<uint32_t>& word, uint32_t value, uint64_t ns) {
    if constexpr (simulation::kOn) {
        return simulation::sleep(&word, value, ns, {"sleep", __FILE__, __func__, __LINE__});
    }
    timespec t{static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &t, nullptr, 0);
}

void futex_wake(Shared<uint32_t>& word) {
    if constexpr (simulation::kOn) return simulation::wake(&word);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void yield_core() {
    if constexpr (simulation::kOn) return simulation::yield({"yield", __FILE__, __func__, __LINE__});
    sched_yield();
}

// The number of involuntary context switches of this thread: a yield that had an effect counts.
long switches() {
    if constexpr (simulation::kOn) return simulation::switches();
    rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nivcsw;
}

// One descriptor per process, however many communicators watch it.
struct Watched {
    int fd, users;
};
std::mutex watched_mutex;
[[maybe_unused]] const bool registered = (keep_over_fork<watched_mutex>(), true);
// Never destroyed: threads may wait until the process has ended.
std::map<int, Watched>& watched = *new std::map<int, Watched>();

int watch_process(int pid) {
    std::lock_guard lock(watched_mutex);
    auto known = watched.find(pid);
    if (known != watched.end()) {
        // The process of this descriptor has ended, and its pid may be in use again: opens a new one.
        pollfd p{known->second.fd, POLLIN, 0};
        if (poll(&p, 1, 0) == 0) {
            ++known->second.users;
            return known->second.fd;
        }
    }
    int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    if (fd < 0) throw_errno("cannot watch process " + std::to_string(pid));
    if (known == watched.end()) watched.emplace(pid, Watched{fd, 1});
    return fd;
}

void unwatch_process(int pid, int fd) {
    std::lock_guard lock(watched_mutex);
    auto known = watched.find(pid);
    if (known == watched.end() || known->second.fd != fd) {
        close(fd);
    } else if (--known->second.users == 0) {
        close(fd);
        watched.erase(known);
    }
}

}  // namespace

ProcessWatch::ProcessWatch(const std::vector<int>& pids) {
    try {
        for (int pid : pids)
            watched_.push_back({pid, pid == static_cast<int>(getpid()) ? -1 : watch_process(pid)});
    } catch (...) {
        release();
        throw;
    }
}

ProcessWatch::~ProcessWatch() { release(); }

void ProcessWatch::release() {
    for (auto [pid, fd] : watched_) {
        if (fd >= 0) unwatch_process(pid, fd);
    }
    watched_.clear();
}

bool ProcessWatch::dead(int rank) const {
    int fd = watched_[static_cast<size_t>(rank)].second;
    if (fd < 0) return simulation::ended(rank);
    pollfd p{fd, POLLIN, 0};
    return poll(&p, 1, 0) == 1;
}

Waiter::Waiter(Segment& segment, int rank) : segment_(segment), rank_(rank), placement_(segment, rank) {}

// A yield hands the core to another thread of the same scheduling group. Two conditions make it harmful, and
// both are detected as soon as anything else runs. A foreign process of the same group does not yield back:
// it keeps the core for its time slice, some milliseconds. And if each rank is a group of its own (a session
// each under autogroup, as torchrun starts them), a yield has no effect, and this thread burns the core that
// the awaited rank needs.
std::optional<bool> Waiter::yield(const Look& ready, const std::function<bool(bool)>& stop,
                                  const Look& beside, bool spun) {
    if (wanted_ > 0) --wanted_;
    const long switched_before = spun ? switches() : 0;
    uint64_t begin = now_ns(), before = begin;
    long lost = 0;
    for (int i = 1;; ++i) {
        if (ready()) {
            no_yields_ = no_yields_ / 2 > kNoYields ? no_yields_ / 2 : kNoYields;
            return true;
        }
        if (i > kCheapYields) Deferred::waits();
        yield_core();
        // `crowded` counts neither ranks of other jobs and containers nor other threads, but yields do.
        if (spun && i == 1 && switches() != switched_before) {
            wanted_ = placement_.tell_of_yield() ? 0 : kWanted;
        }
        uint64_t now = now_ns();
        bool harmful = now - before > kTakenNs;
        // No awaited rank needs this core any more: spins until the ranks of other cores have come.
        if (placement_.crowded() && wanted_ == 0 && i <= kCheapYields && !harmful && !beside()) {
            if (spin(ready)) return true;
            now = now_ns();
        }
        before = now;
        if (i % kYields == 0) {
            if (stop(false)) return ready();
            if (now - begin > kYieldNs) return std::nullopt;
            if (placement_.crowded()) {
                long switched = switches();
                // The other threads of this core may be asleep: no reason to sleep at once next time.
                if (i > kYields && switched - lost < kFewSwitches) {
                    wanted_ = kWanted;
                    return std::nullopt;
                }
                lost = switched;
            }
        }
        if (harmful) {
            placement_.taken(now);
            sleep_at_once_ = no_yields_;
            no_yields_ = no_yields_ * 2 < kMostNoYields ? no_yields_ * 2 : kMostNoYields;
            return std::nullopt;
        }
    }
}

bool Waiter::slow(const Look& ready, const std::function<bool(bool)>& stop, const Look& beside, bool spun) {
    if (sleep_at_once_ > 0) {
        --sleep_at_once_;
    } else if (auto over = yield(ready, stop, beside, spun)) {
        return *over;
    }
    Deferred::waits();
    RankControl& me = segment_.control(rank_);
    Shared<uint32_t>& sleepers = segment_.header().sleepers;
    uint64_t nap = kFirstSleepNs;
    me.wait.fetch_add(1);
    struct NoLonger {
        Shared<uint32_t>& waits_for;
        const std::function<void()>& then;
        bool failed = false;
        ~NoLonger() {
            if (!failed) waits_for.store(0);
            if (then) then();
        }
    } at_the_end{me.waits_for, at_end_};
    for (;;) {
        uint32_t bell = me.doorbell.load();
        me.sleeping.fetch_add(1);
        sleepers.fetch_add(1);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        bool now = ready();
        if (!now) futex_wait(me.doorbell, bell, nap);
        sleepers.fetch_sub(1);
        me.sleeping.fetch_sub(1);
        if (now || ready()) return true;
        if (stop(true)) {
            bool come = ready();
            // Until this rank has told its fault, the others must not take it for one that does not wait.
            at_the_end.failed = !come;
            return come;
        }
        nap = nap * 2 < kLongestSleepNs ? nap * 2 : kLongestSleepNs;
    }
}

void Waiter::wake_me() {
    RankControl& me = segment_.control(rank_);
    me.doorbell.fetch_add(1);
    futex_wake(me.doorbell);
}

void Waiter::ring_doorbells() {
    for (int r = 0; r < segment_.layout().world; ++r) ring_doorbell(r);
}

void Waiter::ring_doorbell(int rank) {
    RankControl& c = segment_.control(rank);
    if (c.sleeping.load() == 0) return;
    c.doorbell.fetch_add(1);
    futex_wake(c.doorbell);
}

}  // namespace unicomm::shm
