// A mutex of the process that no fork may copy in a locked state: the thread that would unlock it does not
// exist in the child.
#pragma once
#include <pthread.h>

#include <mutex>

namespace unicomm {

// Whoever forks holds it meanwhile. To be called once, when the library is loaded.
template <std::mutex& mutex>
void keep_over_fork() {
    pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
}

}  // namespace unicomm
