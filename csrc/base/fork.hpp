// Mutexes of the process that must not be locked in a forked child: the thread that would unlock one does not
// exist there.
#pragma once
#include <pthread.h>

#include <mutex>

namespace unicomm {

// Makes a fork hold `mutex`. To be called once, when the library is loaded.
template <std::mutex& mutex>
void keep_over_fork() {
    pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
}

}  // namespace unicomm
