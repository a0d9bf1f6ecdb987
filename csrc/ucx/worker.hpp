// One communicator's UCX worker: its endpoints, its messages, and waiting for them.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ucx/library.hpp"

namespace unicomm::ucx {

// What UCX reports: a connection has ended, or a call has failed.
struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// What a message is part of. Messages of different kinds do not match each other.
enum class Kind : uint8_t { kMessage = 0, kSlot = 1, kShare = 2, kResult = 3, kHello = 4 };

constexpr int kAnyRank = -1;

class Worker;

// One send or receive. The worker owns it, so that a wait that is given up leaves nothing behind.
struct Request {
    Worker* worker = nullptr;
    void* native = nullptr;
    int peer = 0;  // of a receive from any rank: the sender, once it is done
    bool send = false;
    bool done = false;
    Status status = kOk;
    size_t length = 0;  // of the message that a receive got, which may be longer than its memory

    bool waits() const { return native != nullptr && !done; }
};

// Why a wait ended.
enum class Ended { kDone, kStopped, kRoused, kLate, kSignal };

// All methods but `stop` and `rouse` are called by one thread at a time; `drop` waits for who is in a `wait`.
class Worker {
  public:
    // Names, without UCX_, and values of UCX's configuration, and whether this UCX has to have them.
    using Settings = std::vector<std::tuple<std::string, std::string, bool>>;

    // `spin_ns`: for how long a wait polls
    // before it sleeps. Throws Failure.
    Worker(std::shared_ptr<Library> library, int rank, int size, const Settings& settings, uint64_t spin_ns);
    ~Worker();
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }
    const std::string& address() const { return address_; }
    // Makes the endpoints to the workers with these addresses, in order of ranks. Throws Failure.
    void connect(const std::vector<std::string>& addresses);
    // As "transport/device" for each way to a peer, unless this UCX does not tell.
    std::vector<std::string> transports(int peer) const;

    // Begin a message, which may be done at once; `release` gives its request back. Throw Failure.
    Request* send(int peer, const void* data, size_t bytes, Kind kind, uint32_t tag = 0);
    Request* receive(int peer, void* data, size_t bytes, Kind kind, uint32_t tag = 0);
    void release(Request* request);
    // Memory that messages use must live until they are over, also if a wait is given up.
    char* hold(size_t bytes);
    void let_go();
    char* hold_always(size_t bytes);

    // Runs UCX until `done()`, which it asks after each progress. `deadline`: by now_ns(). A rouse ends only
    // waits that are `rousable`. Called without the GIL. Throws Failure.
    Ended wait(const std::function<bool()>& done, uint64_t deadline, bool rousable = false);
    // Waits until the system has all that was sent: UCX completes a send that it has only buffered, and sends
    // the rest when it is called next, which may be much later. It answers receives in the same way. Throws
    // Failure.
    Ended flush(uint64_t deadline);
    // Whether the system has all of that by now; begins a flush if none covers the last message. Throws
    // Failure.
    bool flushed();

    // By any thread: `stop` ends all waits from now on, `rouse` the running one, or the next.
    void stop();
    void rouse();
    bool stopped() const { return stopped_.load(std::memory_order_acquire); }

    // Ends the connections and what is under way: no memory of a message is touched from then on. Returns
    // false if UCX does not let go of some; it then keeps everything, and the memory has to stay as well.
    bool drop();
    // In a forked child: lets go without a call of UCX.
    void forget();

  private:
    void make_context(const Settings& settings);
    Request* begin(int peer, bool send);
    Request* begun(Request* request, StatusPointer got, const ReceiveInfo* info);
    static void sent(void* native, Status status, void* request);
    static void received(void* native, Status status, const ReceiveInfo* info, void* request);
    static void broke(void* worker, Endpoint endpoint, Status status);
    void finish(Request& request, Status status, const ReceiveInfo* info);
    void reap();
    void check_broken() const;
    void keep_for_ever();
    Failure failure(const char* what, Status status) const;
    void check(const char* what, Status status) const;
    void sleep(uint64_t deadline);

    std::shared_ptr<Library> library_;
    const Functions& ucx_;
    const int rank_, size_;
    const uint64_t spin_ns_;
    Context context_ = nullptr;
    NativeWorker worker_ = nullptr;
    std::string address_;
    std::vector<Endpoint> endpoints_;
    std::deque<Request> requests_;
    std::vector<Request*> free_, over_;
    std::vector<std::unique_ptr<char[]>> held_, always_held_;
    int ready_ = -1;  // UCX's file, which is readable when there is something to do
    int wake_ = -1;   // ours, for `stop` and `rouse`
    std::mutex waking_;
    std::timed_mutex waited_in_;  // by `wait` for its duration
    std::atomic<bool> stopped_{false}, roused_{false};
    // Messages that have begun or completed: in all, when the flush began that is under way, and when the
    // last one began that is over.
    uint64_t events_ = 0, flushing_ = 0, flushed_ = 0;
    StatusPointer flush_ = nullptr;
    std::vector<bool> broken_;  // endpoints whose connection has ended; empty if none
    std::string trouble_;       // the first failure of a connection
};

}  // namespace unicomm::ucx
