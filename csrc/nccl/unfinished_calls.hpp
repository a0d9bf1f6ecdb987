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

// What a call of the library reads, and the place that it fills in with what it creates.
template <class Inputs>
struct Creation {
    Inputs inputs;
    void* place = nullptr;

    void* made() const { return __atomic_load_n(&place, __ATOMIC_ACQUIRE); }  // written by another thread
};

// Runs `call(creation)`, which creates something, and returns (result, what was created). With blocking=0 the
// library may return success or "in progress", and read the inputs and fill in the place later. So the
// creation is kept until `state(made)`, the state of the communicator that was asked, is no longer "in
// progress"; and for good if that takes longer than `seconds`, or `state` throws. `pause` waits between two
// questions.
template <class Inputs, class Call, class State, class Pause>
std::pair<int, void*> create(std::unique_ptr<Creation<Inputs>> creation, double seconds, Call call,
                             State state, Pause pause) {
    int result = call(*creation);
    if (result != kSuccess && result != kInProgress) return {result, nullptr};
    Creation<Inputs>* kept = creation.release();
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    int found;
    while ((found = state(kept->made())) == kInProgress) {
        if (std::chrono::steady_clock::now() > end) return {kInProgress, kept->made()};
        pause();
    }
    void* made = kept->made();
    if (made == nullptr && found != kSuccess) return {found, nullptr};
    // An error that the parent has from before says nothing about what there is.
    delete kept;
    return {kSuccess, made};
}

// The state of a communicator, as CommGetAsyncError tells it.
inline int state_of(const Functions& library, Comm comm) {
    int state = kInProgress, asked = library.CommGetAsyncError(comm, &state);
    return asked == kSuccess ? state : asked;
}

inline void pause_briefly() { std::this_thread::sleep_for(std::chrono::microseconds(200)); }

// The device of a communicator, by the device runtime's function that makes it the thread's current one.
struct Device {
    int (*set)(int) = nullptr;  // null: there is one device only
    int index = 0;
};

// Runs `call` in a thread of its own, on the device. Returns its result, or kInProgress if it has not
// returned within `seconds`; the thread then goes on, also with `afterwards` unless the result is
// kInProgress, until the process ends. So both must own what they use and hold no Python object. Calls that
// end a communicator need this: the library waits for graphs that have captured its operations, and for other
// communicators on the same device.
inline int run_within(
    double seconds, Device device, std::function<int()> call, std::function<void()> afterwards = [] {}) {
    struct Outcome {
        std::mutex mutex;
        std::condition_variable changed;
        std::optional<int> result;
        bool left = false;  // nobody waits for the result any more
    };
    auto outcome = std::make_shared<Outcome>();
    sigset_t all, before;  // the program's signals are not for this thread
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread([outcome, device, call = std::move(call), afterwards = std::move(afterwards)] {
        // A new thread is on device 0, where the library would create a context when it restores the device.
        if (device.set != nullptr) device.set(device.index);
        int result = call();
        {
            std::lock_guard lock(outcome->mutex);
            outcome->result = result;
            outcome->changed.notify_all();
            if (!outcome->left || result == kInProgress) return;
        }
        afterwards();
    }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    std::unique_lock lock(outcome->mutex);
    outcome->left = !outcome->changed.wait_for(lock, std::chrono::duration<double>(seconds),
                                               [&] { return outcome->result.has_value(); });
    return outcome->result.value_or(kInProgress);
}

// Finalizes the communicator, if the library can, and destroys it. Returns the result of the last call.
inline int finalize_and_destroy(const Functions& library, Comm comm) {
    if (library.CommFinalize != nullptr && library.CommFinalize(comm) == kInProgress) {
        // With blocking=0 it continues in the background, and CommDestroy requires that it is complete.
        while (state_of(library, comm) == kInProgress) pause_briefly();
    }
    return library.CommDestroy(comm);
}

// Ends what runs on the communicator, and keeps it. Returns the result, or kInProgress if the library has not
// completed that within `seconds` after its call has returned; then aborts the communicator.
inline int revoke_or_abort(const Functions& library, Comm comm, double seconds) {
    int result = library.CommRevoke(comm, 0);
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (result == kInProgress && std::chrono::steady_clock::now() < end) {
        pause_briefly();
        result = state_of(library, comm);
    }
    if (result == kInProgress) library.CommAbort(comm);
    return result;
}

}  // namespace unicomm::nccl
