// Calls that make something of a communicator, for the library's two ways to return from them.
#pragma once
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "nccl/library.hpp"

namespace unicomm::nccl {

// (result, what was made) of what `call(place)` makes of `parent`. With blocking=0 the library fills the
// place in later, when the parent is no longer in progress: so it must stay until then, or for good where
// that takes longer than `seconds`.
template <class Call>
std::pair<int, void*> made_of(const Functions& library, Comm parent, double seconds, Call call) {
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

}  // namespace unicomm::nccl
