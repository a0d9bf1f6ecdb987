// What the threads of a process that wait in shared-memory communicators wait for, for all processes of the
// user on this host to read: who waits in one communicator may be what others wait for in another, of which
// they are no members.
//
// A board is a memfd like a segment: no name, private, opened through /proc/PID/fd, and sealed, so that a
// reader's mapping stays good. It lives as long as its process has a communicator. Only its own process
// writes.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

namespace unicomm::shm {

constexpr int kWaits = 64;        // threads of a process that are seen waiting at the same time
constexpr int kPromises = 64;     // ranks of a process of which something is said
constexpr int kMostAwaited = 64;  // ranks that one wait names

// Where a process's board is.
struct BoardRef {
    uint64_t id = 0;  // random; 0: no board
    int32_t pid = 0, fd = -1;
};

// A value that one thread writes and others copy: `version` is 0 while there is none, and changes with the
// value.
template <class T>
class Published {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);
    static constexpr size_t kWords = sizeof(T) / 8;

  public:
    void publish(const T& value, uint64_t version);
    void withdraw() { version_.store(0, std::memory_order_release); }
    uint64_t version() const { return version_.load(std::memory_order_acquire); }
    uint64_t read(T& value) const;  // its version; 0: there is none, or it is being written

  private:
    std::atomic<uint64_t> version_;
    std::atomic<uint64_t> words_[kWords];
};

// One rank of a communicator that waits.
struct Waiting {
    uint64_t comm;    // the segment's id
    uint64_t thread;  // pthread_self()
    int32_t rank;
    uint32_t op;
    uint32_t joinable;  // more messages may join it: what others wait for may still come from this rank
    uint32_t any;       // it goes on when one of those that it awaits acts, not only when all have
    uint64_t seq;       // of the operation; 0 where it is not known
    uint32_t line, awaited_count;
    char name[48];  // of the communicator; may lack its end
    char file[96];  // the user's, its last part
    struct Awaited {
        BoardRef board;
        int32_t rank;
        uint32_t unused;
    } awaited[kMostAwaited];
};

// Nobody in this process will enter communicator `comm` as `rank` unless one of these waits ends.
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
    Published<Waiting> waiting;   // its version is the number of the wait
    std::atomic<uint64_t> looks;  // how often the waiting thread looked and had to go on
    std::atomic<uint64_t> found;  // the wait of which it knows that it will never end
    std::atomic<uint64_t> left;   // the one that it has left because of that
    std::atomic<uint64_t> taken;  // by a thread of this process
};

struct BoardPage {
    uint64_t magic, id;
    int32_t pid;
    alignas(128) WaitSlot waits[kWaits];
    Published<Promise> promises[kPromises];
};

class Board {
  public:
    // This process's own, made when there is none; null when the system refuses, or in a process with too
    // little left: then its deadlocks end at their deadline.
    static std::shared_ptr<Board> mine();
    // That of any process; null when it is not there (any more), or is none.
    static std::shared_ptr<const Board> open(const BoardRef& ref);

    ~Board();
    Board(const Board&) = delete;
    Board& operator=(const Board&) = delete;

    BoardRef ref() const { return ref_; }
    BoardPage& page() { return *page_; }
    const BoardPage& page() const { return *page_; }

    // --- of the own one ---
    int take_slot();  // -1: all are taken
    void free_slot(int slot) { page_->waits[slot].taken.store(0); }
    uint64_t next_number() { return numbers_.fetch_add(1) + 1; }
    void promise(const Promise& promise);
    const Published<Promise>* promise_of(uint64_t comm, int rank, Promise& said, uint64_t& version) const;
    std::mutex promising;  // held while this process looks at its threads

  private:
    Board() = default;
    BoardRef ref_;
    BoardPage* page_ = nullptr;
    int fd_ = -1;
    std::atomic<uint64_t> numbers_{0};
    std::atomic<int> next_slot_{0}, next_promise_{0};
};

template <class T>
void Published<T>::publish(const T& value, uint64_t version) {
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
uint64_t Published<T>::read(T& value) const {
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

// 64 random bits, never 0.
uint64_t random_id();

}  // namespace unicomm::shm
