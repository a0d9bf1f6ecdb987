// The seam between the core and a deterministic simulation of it (csrc/tests/simulation). With
// UNICOMM_SIMULATION the ranks are fibers of one thread: a scheduler decides at each access to a shared word
// which of them goes on, time is virtual, and processes end and stop when the scheduler says so. Without it,
// nothing here adds an instruction: Shared is std::atomic, Mutex is std::mutex, and the rest is constant.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

namespace unicomm {
namespace simulation {

#ifdef UNICOMM_SIMULATION
constexpr bool kOn = true;
constexpr int kProcesses = 8;  // simulated processes, one per rank
#else
constexpr bool kOn = false;
constexpr int kProcesses = 1;
#endif

// Where in the source a point is.
struct Place {
    const char* what;
    const char* file;
    const char* function;
    int line;
};

// The scheduler implements these. They are called only `if constexpr (kOn)`.
void reach(const Place& place);  // a point was reached at which the scheduler wants to act
uint64_t now_ns();
void yield(const Place& place);
void sleep(const void* word, uint32_t value, uint64_t ns, const Place& place);  // a futex
void wake(const void* word);
long switches();  // yields of this fiber that let another one run
int cores();
int current_process();
bool process_ended(int process);
uint64_t random_id();
extern uint64_t points_left;  // until the scheduler wants to act

// To be called where another rank may act between two steps of this one.
inline void point([[maybe_unused]] const char* what, [[maybe_unused]] const char* file = __builtin_FILE(),
                  [[maybe_unused]] const char* function = __builtin_FUNCTION(),
                  [[maybe_unused]] int line = __builtin_LINE()) {
    if constexpr (kOn) {
        if (--points_left == 0) reach({what, file, function, line});
    }
}

// The index of the process that runs, below kProcesses.
inline int process() {
    if constexpr (kOn) {
        return current_process();
    } else {
        return 0;
    }
}

// Whether the process of a rank that shares this process's pid has ended.
inline bool ended([[maybe_unused]] int process) {
    if constexpr (kOn) {
        return process_ended(process);
    } else {
        return false;
    }
}

}  // namespace simulation

#ifdef UNICOMM_SIMULATION

// A std::atomic each of whose operations is a point. After a load that acquires there is another one: between
// the load and what it guards.
template <class T>
class Shared {
    using Order = std::memory_order;
    static constexpr Order kSeqCst = std::memory_order_seq_cst;

  public:
    Shared() = default;
    constexpr Shared(T value) : value_(value) {}
    Shared(const Shared&) = delete;
    Shared& operator=(const Shared&) = delete;

    T load(Order order = kSeqCst, const char* file = __builtin_FILE(),
           const char* function = __builtin_FUNCTION(), int line = __builtin_LINE()) const {
        simulation::point("load", file, function, line);
        T value = value_.load(order);
        if (order != std::memory_order_relaxed) simulation::point("loaded", file, function, line);
        return value;
    }
    void store(T value, Order order = kSeqCst, const char* file = __builtin_FILE(),
               const char* function = __builtin_FUNCTION(), int line = __builtin_LINE()) {
        simulation::point("store", file, function, line);
        value_.store(value, order);
    }
#define UNICOMM_SHARED_CHANGE(name)                                                    \
    T name(T by, Order order = kSeqCst, const char* file = __builtin_FILE(),           \
           const char* function = __builtin_FUNCTION(), int line = __builtin_LINE()) { \
        simulation::point(#name, file, function, line);                                \
        return value_.name(by, order);                                                 \
    }
    UNICOMM_SHARED_CHANGE(fetch_add)
    UNICOMM_SHARED_CHANGE(fetch_sub)
    UNICOMM_SHARED_CHANGE(fetch_or)
    UNICOMM_SHARED_CHANGE(exchange)
#undef UNICOMM_SHARED_CHANGE
    bool compare_exchange_strong(T& expected, T wanted, Order order = kSeqCst,
                                 const char* file = __builtin_FILE(),
                                 const char* function = __builtin_FUNCTION(), int line = __builtin_LINE()) {
        simulation::point("compare_exchange", file, function, line);
        return value_.compare_exchange_strong(expected, wanted, order);
    }
    operator T() const { return load(); }
    T operator=(T value) {
        store(value);
        return value;
    }

  private:
    std::atomic<T> value_;
};

// A mutex that a fiber may hold while another one runs.
class Mutex {
  public:
    void lock() {
        while (!try_lock()) simulation::yield({"mutex", __builtin_FILE(), "lock", __LINE__});
    }
    bool try_lock() { return !std::exchange(locked_, true); }
    void unlock() { locked_ = false; }

  private:
    bool locked_ = false;
};

#else

template <class T>
using Shared = std::atomic<T>;
using Mutex = std::mutex;

#endif

}  // namespace unicomm
