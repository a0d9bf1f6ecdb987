// Calls that end a communicator. They may not return for long: the library waits for the graphs that have
// captured its operations, and the device for what other communicators have on it.
#pragma once
#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "nccl/library.hpp"

namespace unicomm::nccl {

// What `call` returns, if it does within `seconds`; else kInProgress, and it goes on in a thread of its own,
// until the process ends. So it owns what it uses, and nothing of Python's.
inline int within(double seconds, std::function<int()> call) {
    struct Ending {
        std::mutex mutex;
        std::condition_variable changed;
        std::optional<int> result;
    };
    auto ending = std::make_shared<Ending>();
    sigset_t all, before;  // no signal of the program's is for this thread
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread([ending, call = std::move(call)] {
        int result = call();
        std::lock_guard lock(ending->mutex);
        ending->result = result;
        ending->changed.notify_all();
    }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    std::unique_lock lock(ending->mutex);
    ending->changed.wait_for(lock, std::chrono::duration<double>(seconds),
                             [&] { return ending->result.has_value(); });
    return ending->result.value_or(kInProgress);
}

// Finalises a communicator, where the library can, and destroys it; the result is that of the last call.
inline int end_of_life(const Functions& library, Comm comm) {
    if (library.CommFinalize != nullptr && library.CommFinalize(comm) == kInProgress) {
        // With blocking=0 it goes on by itself, and destroying wants it done.
        for (int state = kInProgress;
             library.CommGetAsyncError(comm, &state) == kSuccess && state == kInProgress;) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }
    return library.CommDestroy(comm);
}

}  // namespace unicomm::nccl
