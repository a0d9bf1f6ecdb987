// Waiting that works with idle cores, busy cores and more ranks than cores: spins for some microseconds
// (unless others want the core), then yields, then sleeps in the kernel. Meanwhile the waiting thread checks
// the abort flag, the deadline and the processes of its peers.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "shm/memory/segment.hpp"
#include "shm/waiting/deferred.hpp"
#include "shm/waiting/placement.hpp"

namespace unicomm::shm {

inline void cpu_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Watches the processes of peers through pidfds. Also detects zombies, and never takes a reused pid for the
// peer.
class ProcessWatch {
  public:
    explicit ProcessWatch(const std::vector<int>& pids);
    ~ProcessWatch();
    ProcessWatch(const ProcessWatch&) = delete;
    ProcessWatch& operator=(const ProcessWatch&) = delete;
    bool dead(int rank) const;

  private:
    void release();
    std::vector<std::pair<int, int>> watched_;  // (pid, pidfd); -1 for a rank of this process
};

class Waiter {
  public:
    // A wait that is over after so many looks, about 1 us, is no reason to give a lock back.
    static constexpr int kAtOnce = 80;

    Waiter(Segment& segment, int rank);

    // Calls `ready` until it returns true. Returns false if `stop` asks to give up; `stop` is called about
    // every millisecond, at least every 50 ms, and returns true to give up. `beside` says whether an awaited
    // rank has to get this rank's core first, and is asked only if there are more ranks than cores.
    template <class Ready, class Stop, class Beside>
    bool until(Ready ready, Stop stop, Beside beside) {
        if (ready()) return true;
        const bool spins = may_spin(beside);
        if (spins && spin(ready)) return true;
        return slow(std::ref(ready), std::ref(stop), std::ref(beside), spins);
    }
    // Whether `ready` returns true as long as `until` would spin.
    template <class Ready, class Beside>
    bool soon(Ready ready, Beside beside) const {
        return ready() || (may_spin(beside) && spin(ready));
    }
    template <class Ready, class Stop>
    bool until(Ready ready, Stop stop) {
        return until(ready, stop, [] { return false; });
    }
    // As of Placement.
    void tell_core() {
        if (placement_.tell()) wanted_ = 0;
    }
    bool beside(int rank) const { return placement_.beside(rank); }
    // To be called when `until` has returned false without a fault: else this rank goes on to count as
    // waiting.
    void waits_no_longer() { segment_.control(rank_).waits_for.store(0); }
    // To be called after publishing what others may sleep for.
    void wake_others() {
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (segment_.header().sleepers.load(std::memory_order_relaxed) != 0) ring_doorbells();
    }
    // The same for what one rank alone may sleep for.
    void wake(int rank) {
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (segment_.header().sleepers.load(std::memory_order_relaxed) != 0) ring_doorbell(rank);
    }
    // Makes `until` check again; may be called from another thread.
    void wake_me();
    // Sets what is called at the end of a wait for which `stop` was called.
    void at_end(std::function<void()> call) { at_end_ = std::move(call); }

  private:
    static constexpr int kSpins = 400;  // about 5 us of pauses

    using Look = std::function<bool()>;
    template <class Beside>
    bool may_spin(Beside& beside) const {
        return wanted_ == 0 && !(placement_.crowded() && (sleep_at_once_ > 0 || beside()));
    }
    template <class Ready>
    static bool spin(Ready& ready) {
        for (int i = 0; i < kSpins; ++i) {
            if (i == kAtOnce) Deferred::waits();
            cpu_pause();
            if (ready()) return true;
        }
        return false;
    }
    // Like `slow`; returns nothing if sleeping is better.
    std::optional<bool> yield(const Look& ready, const std::function<bool(bool)>& stop, const Look& beside,
                              bool spun);
    bool slow(const Look& ready, const std::function<bool(bool)>& stop, const Look& beside, bool spun);
    void ring_doorbells();
    void ring_doorbell(int rank);

    Segment& segment_;
    int rank_;
    Placement placement_;
    int wanted_ = 0;         // number of waits that yield and do not spin before, as others want this core
    int sleep_at_once_ = 0;  // number of waits that skip yielding
    int no_yields_ = 50;     // its value for the next time that yields do harm
    std::function<void()> at_end_;
};

}  // namespace unicomm::shm
