// The wait table of a process: what its threads that wait in shared-memory communicators wait for. All
// processes of the user on this host can read it, because a rank that waits in one communicator may be the
// one that ranks of another communicator wait for.
//
// A wait table is a memfd, like a segment: it has no name, is private, is opened through /proc/PID/fd, and is
// sealed, so that a mapping stays valid. It exists as long as its process has a communicator. Only its own
// process writes to it.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "base/simulation.hpp"

namespace unicomm::shm {

constexpr int kWaits = 64;        // threads of a process that can be seen waiting at the same time
constexpr int kPromises = 64;     // ranks of a process that can have a promise
constexpr int kMostAwaited = 64;  // ranks that one wait can name

// Where the wait table of a process is.
struct WaitTableRef {
    uint64_t id = 0;  // random; 0: no wait table
    int32_t pid = 0, fd = -1;
};

// A value that one thread writes and other processes copy. `version` is 0 while there is no value, and
// changes with the value.
template <class T>
class Seqlock {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);
    static constexpr size_t kWords = sizeof(T) / 8;

  public:
    void publish(const T& value, uint64_t version);
    void withdraw() { version_.store(0, std::memory_order_release); }
    uint64_t version() const { return version_.load(std::memory_order_acquire); }
    uint64_t read(T& value) const;  // returns its version; 0 if there is none, or it is being written

  private:
    Shared<uint64_t> version_;
    Shared<uint64_t> words_[kWords];
};

// A rank that waits in a communicator.
struct Waiting {
    uint64_t comm;    // the segment's id
    uint64_t thread;  // pthread_self()
    int32_t rank;
    uint32_t op;
    uint16_t joinable;  // more messages may join the wait, so this rank may still act
    uint16_t aside;     // no thread of the program waits for it
    uint16_t any;       // the wait ends when any awaited rank acts, not only when all have
    uint16_t open;      // any thread may end it: it says where this rank is, and is part of no circle
    uint64_t seq;       // of the operation; 0 if unknown
    uint32_t line, awaited_count;
    char name[48];  // of the communicator; may be truncated
    char file[96];  // of the user's call; its last part
    struct Awaited {
        WaitTableRef table;
        int32_t rank;
        uint32_t unused;
    } awaited[kMostAwaited];
};

// A promise: no thread of this process will enter communicator `comm` as `rank` unless one of these waits
// ends.
struct Promise {
    uint64_t comm;
    int32_t rank;
    uint32_t count;
    struct Of {
        uint64_t wait;
        uint64_t slot;
    } of[kWaits];
};

struct alignas(128) WaitSlot {
    Seqlock<Waiting> waiting;  // the version is the number of the wait
    Shared<uint64_t> looks;    // how often the thread checked and had to go on waiting
    Shared<uint64_t> found;    // the wait that the thread knows to be deadlocked
    Shared<uint64_t> left;     // the wait that it left because of a deadlock
    Shared<uint64_t> failed;   // the wait that has ended with a fault
    Shared<uint64_t> taken;    // whether a thread of this process has the slot
};

struct WaitTablePage {
    uint64_t magic, id;
    int32_t pid;
    alignas(128) WaitSlot waits[kWaits];
    Seqlock<Promise> promises[kPromises];
};

class WaitTable {
  public:
    // The wait table of this process, created if there is none. Null if the system refuses, or no descriptors
    // or memory are left; a deadlock then lasts until its deadline.
    static std::shared_ptr<WaitTable> mine();
    // The wait table of any process; null if it does not exist (any more), or is none.
    static std::shared_ptr<const WaitTable> open(const WaitTableRef& ref);

    ~WaitTable();
    WaitTable(const WaitTable&) = delete;
    WaitTable& operator=(const WaitTable&) = delete;

    WaitTableRef ref() const { return ref_; }
    WaitTablePage& page() { return *page_; }
    const WaitTablePage& page() const { return *page_; }

    // --- for the own table ---
    int take_slot();  // -1 if all are taken
    void free_slot(int slot) { page_->waits[slot].taken.store(0); }
    uint64_t next_number() { return numbers_.fetch_add(1) + 1; }
    void promise(const Promise& promise);
    const Seqlock<Promise>* promise_of(uint64_t comm, int rank, Promise& said, uint64_t& version) const;
    Mutex promising;  // held while this process checks its threads

  private:
    WaitTable() = default;
    WaitTableRef ref_;
    WaitTablePage* page_ = nullptr;
    int fd_ = -1;
    std::atomic<uint64_t> numbers_{0};
    std::atomic<int> next_slot_{0}, next_promise_{0};
};

template <class T>
void Seqlock<T>::publish(const T& value, uint64_t version) {
    version_.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    const auto* from = reinterpret_cast<const char*>(&value);
    for (size_t i = 0; i < kWords; ++i) {
        uint64_t word;
        __builtin_memcpy(&word, from + 8 * i, 8);
        words_[i].store(word, std::memory_order_relaxed);
    }
    version_.store(version, std::memory_order_release);
}

template <class T>
uint64_t Seqlock<T>::read(T& value) const {
    uint64_t before = version_.load(std::memory_order_acquire);
    if (before == 0) return 0;
    auto* to = reinterpret_cast<char*>(&value);
    for (size_t i = 0; i < kWords; ++i) {
        uint64_t word = words_[i].load(std::memory_order_relaxed);
        __builtin_memcpy(to + 8 * i, &word, 8);
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    return version_.load(std::memory_order_relaxed) == before ? before : 0;
}

// Returns 64 random bits, never 0.
uint64_t random_id();

}  // namespace unicomm::shm
