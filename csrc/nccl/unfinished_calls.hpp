// Calls of the library that may return, or have to be left, before they are complete.
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

// Runs `call(place)`, which creates something from communicator `parent`, and returns (result, what was
// created). With blocking=0 the library fills `place` in later, while the parent is in progress. So `place`
// stays allocated until then, and for good if that takes longer than `seconds`.
template <class Call>
std::pair<int, void*> create_from(const Functions& library, Comm parent, double seconds, Call call) {
    auto place = std::make_unique<void*>(nullptr);
    int result = call(place.get());
    if (result != kInProgress) return {result, *place};
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (;;) {
        int state = kInProgress;
        int asked = library.CommGetAsyncError(parent, &state);
        if (asked != kSuccess) return place.release(), std::pair(asked, static_cast<void*>(nullptr));
        if (state != kInProgress) return {state, *place};
        if (std::chrono::steady_clock::now() > end)
            return place.release(), std::pair(int(kInProgress), static_cast<void*>(nullptr));
        std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
}

// Runs `call` in a thread of its own. Returns its result, or kInProgress if it has not returned within
// `seconds`; the thread then goes on until the process ends, so `call` must own what it uses and hold no
// Python object. Calls that end a communicator need this: the library waits for graphs that have captured its
// operations, and for other communicators on the same device.
inline int run_within(double seconds, std::function<int()> call) {
    struct Outcome {
        std::mutex mutex;
        std::condition_variable changed;
        std::optional<int> result;
    };
    auto outcome = std::make_shared<Outcome>();
    sigset_t all, before;  // the program's signals are not for this thread
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread([outcome, call = std::move(call)] {
        int result = call();
        std::lock_guard lock(outcome->mutex);
        outcome->result = result;
        outcome->changed.notify_all();
    }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    std::unique_lock lock(outcome->mutex);
    outcome->changed.wait_for(lock, std::chrono::duration<double>(seconds),
                              [&] { return outcome->result.has_value(); });
    return outcome->result.value_or(kInProgress);
}

// Finalizes the communicator, if the library can, and destroys it. Returns the result of the last call.
inline int finalize_and_destroy(const Functions& library, Comm comm) {
    if (library.CommFinalize != nullptr && library.CommFinalize(comm) == kInProgress) {
        // With blocking=0 it continues in the background, and CommDestroy requires that it is complete.
        for (int state = kInProgress;
             library.CommGetAsyncError(comm, &state) == kSuccess && state == kInProgress;) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }
    return library.CommDestroy(comm);
}

}  // namespace unicomm::nccl
