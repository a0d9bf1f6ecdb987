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

namespace unicomm::shm {

inline void cpu_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int usable_cores();

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
    // Tells the others on which core this rank is, if there are more ranks than cores.
    void tell_core() {
        if (crowded_) {
            write_core();
            if (++told_ % kToldUntilSpread == 0) spread();
        }
    }
    // Whether the other rank was last on this rank's core.
    bool beside(int rank) const {
        return segment_.control(rank).core.load(std::memory_order_relaxed) == core_;
    }
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
    static constexpr uint32_t kToldUntilSpread = 32;
    static constexpr int kSpins = 400;  // about 5 us of pauses

    using Look = std::function<bool()>;
    template <class Beside>
    bool may_spin(Beside& beside) const {
        return wanted_ == 0 && !(crowded_ && (sleep_at_once_ > 0 || beside()));
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
    void write_core();
    void spread();
    void ring_doorbells();
    void ring_doorbell(int rank);

    Segment& segment_;
    int rank_;
    int cores_;              // that this process may use
    bool crowded_;           // there are more ranks than cores
    uint32_t core_ = 0;      // 1 + the core of this rank, which it has told
    uint32_t told_ = 0;      // how often it has told it
    uint64_t moved_ns_ = 0;  // when it last moved to another core
    uint64_t stays_ns_ = 0;  // until when it does not move
    int wanted_ = 0;         // number of waits that yield and do not spin before, as others want this core
    int sleep_at_once_ = 0;  // number of waits that skip yielding
    int no_yields_ = 50;     // its value for the next time that yields do harm
    std::function<void()> at_end_;
};

}  // namespace unicomm::shm
