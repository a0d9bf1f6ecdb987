// Waiting that is right with idle cores, busy cores and more ranks than cores: spin for some
// microseconds (only while every rank can have a core), then yield, then sleep in the kernel. Whoever
// waits looks at the abort flag, the deadline and the peers' processes on the way.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "shm/segment.hpp"

namespace unicomm::shm {

inline void cpu_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int usable_cores();

// Peers' processes, watched through pidfds: true also for a zombie and never for a reused pid.
class Watch {
  public:
    explicit Watch(const std::vector<int>& pids);
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
    bool dead(int rank) const;

  private:
    void release();
    std::vector<std::pair<int, int>> watched_;  // (pid, pidfd); -1: a rank of this very process
};

class Waiter {
  public:
    Waiter(Segment& segment, int rank);

    // Calls `ready` until it is true; false when `stop` (looked at about every millisecond at the latest
    // every 50 ms) asks to give up. `stop` returns true to give up.
    template <class Ready, class Stop>
    bool until(Ready ready, Stop stop) {
        for (int i = 0; i < spins_; ++i) {
            if (ready()) return true;
            cpu_pause();
        }
        return slow(std::function<bool()>(ready), std::function<bool(bool)>(stop));
    }
    // After publishing something others may sleep for.
    void wake_others() {
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (segment_.header().sleepers.load(std::memory_order_relaxed) != 0) ring_doorbells();
    }
    // From another thread: whatever this rank waits for in `until` is looked at again.
    void wake_me();
    // Called when a wait is over for which `stop` was called.
    void at_end(std::function<void()> call) { at_end_ = std::move(call); }

  private:
    // As `slow`; nothing when it is better to sleep.
    std::optional<bool> yield(const std::function<bool()>& ready, const std::function<bool(bool)>& stop);
    bool slow(const std::function<bool()>& ready, const std::function<bool(bool)>& stop);
    void ring_doorbells();

    Segment& segment_;
    int rank_;
    int spins_;
    int sleep_at_once_ = 0;  // so many waits do without yields
    int no_yields_ = 50;     // as many the next time that yields do harm
    std::function<void()> at_end_;
};

}  // namespace unicomm::shm
