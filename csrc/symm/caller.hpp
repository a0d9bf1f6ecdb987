// A thread for a library's calls that block until other processes come, which nothing ends: who waits for
// them can give up at a deadline.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>

namespace unicomm::symm {

// Never destroyed, for a call may never return.
class Caller {
  public:
    Caller();
    Caller(const Caller&) = delete;
    Caller& operator=(const Caller&) = delete;

    // False when `call` was not over by the deadline (CLOCK_MONOTONIC), or when `given_up` was set (and
    // `wake` called). It may still run then, and so owns what it uses; all later calls come after it. It has
    // the device that is this thread's current one.
    bool run(uint64_t deadline_ns, std::function<void()> call, const std::atomic<bool>* given_up = nullptr);
    void wake();

  private:
    struct State;
    State& state_;
};

}  // namespace unicomm::symm
