// A thread for a library's calls that block until other processes arrive and cannot be interrupted. The
// caller can stop waiting for them at a deadline.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>

namespace unicomm::symm {

// Never destroyed, because a call may never return.
class BlockingThread {
  public:
    BlockingThread();
    BlockingThread(const BlockingThread&) = delete;
    BlockingThread& operator=(const BlockingThread&) = delete;

    // Runs `call` with the current device of the caller. Returns false if it has not returned by the deadline
    // (CLOCK_MONOTONIC), or if `given_up` was set and `wake` called. The call may then still be running, so
    // it must own what it uses; all later calls run after it.
    bool run(uint64_t deadline_ns, std::function<void()> call, const std::atomic<bool>* given_up = nullptr);
    void wake();

  private:
    struct State;
    State& state_;
};

}  // namespace unicomm::symm
