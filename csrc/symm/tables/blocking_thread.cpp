// The thread, its queue, and the device that it takes over from the caller.
#include "symm/tables/blocking_thread.hpp"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

namespace unicomm::symm {
namespace {

// The CUDA driver's context of a thread, which determines its current device. None without a driver.
struct Context {
    void* handle = nullptr;

    static void* driver() { return dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD); }
    static Context current() {
        Context found;
        if (void* library = driver()) {
            auto get = reinterpret_cast<int (*)(void**)>(dlsym(library, "cuCtxGetCurrent"));
            if (get == nullptr || get(&found.handle) != 0) found.handle = nullptr;
        }
        return found;
    }
    void use() const {
        if (handle == nullptr) return;
        if (auto set = reinterpret_cast<int (*)(void*)>(dlsym(driver(), "cuCtxSetCurrent"))) set(handle);
    }
};

struct Task {
    std::function<void()> call;
    Context context;
    bool over = false;
};

}  // namespace

struct BlockingThread::State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::shared_ptr<Task>> tasks;
    int pid = 0;  // of the process that has the thread

    void work() {
        std::unique_lock lock(mutex);
        for (;;) {
            changed.wait(lock, [&] { return !tasks.empty(); });
            auto task = tasks.front();
            tasks.pop_front();
            lock.unlock();
            task->context.use();
            task->call();
            task->call = nullptr;
            lock.lock();
            task->over = true;
            changed.notify_all();
        }
    }

    void start() {
        if (pid == int(getpid())) return;
        pid = int(getpid());
        sigset_t all, before;  // the thread handles no signals of the program
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        std::thread([this] { work(); }).detach();
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
};

BlockingThread::BlockingThread() : state_(*new State) {}

void BlockingThread::wake() {
    std::lock_guard lock(state_.mutex);
    state_.changed.notify_all();
}

bool BlockingThread::run(uint64_t deadline_ns, std::function<void()> call,
                         const std::atomic<bool>* given_up) {
    auto task = std::make_shared<Task>(Task{std::move(call), Context::current()});
    // steady_clock is CLOCK_MONOTONIC here.
    std::chrono::steady_clock::time_point end{std::chrono::nanoseconds(deadline_ns)};
    std::unique_lock lock(state_.mutex);
    state_.start();
    state_.tasks.push_back(task);
    state_.changed.notify_all();
    state_.changed.wait_until(lock, end, [&] { return task->over || (given_up != nullptr && *given_up); });
    return task->over;
}

}  // namespace unicomm::symm
