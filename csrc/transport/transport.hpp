// What carries a communicator's messages between ranks that share no memory: its interface, and waiting.
//
// An engine (ucx/worker.hpp, tcp/streams.hpp) moves messages; all that is built of them is the same over
// each.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace unicomm::transport {

// A connection has ended, or a call of the engine has failed.
struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// What a message is part of. Messages of different kinds do not match each other.
enum class Kind : uint8_t { kMessage = 0, kSlot = 1, kShare = 2, kResult = 3, kHello = 4 };

constexpr int kAnyRank = -1;

class Transport;

// One send or receive. The transport owns it, so that a wait that is given up leaves nothing behind.
struct Request {
    Transport* transport = nullptr;
    void* native = nullptr;  // the engine's
    int peer = 0;            // of a receive from any rank: the sender, once it is done
    bool send = false;
    bool under_way = false;  // the engine has taken it
    bool done = false;
    bool cut = false;   // a receive got a message that is longer than its memory
    size_t length = 0;  // of the message that a receive got

    bool waits() const { return under_way && !done; }
};

// Why a wait ended.
enum class Ended { kDone, kStopped, kRoused, kLate, kSignal };

// All methods but `stop` and `rouse` are called by one thread at a time; `drop` waits for who is in a `wait`.
// The destructor of each engine calls `drop`.
class Transport {
  public:
    virtual ~Transport();
    Transport(const Transport&) = delete;
    Transport& operator=(const Transport&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }

    // Begin a message, which may be done at once; `release` gives its request back. Messages of a kind and
    // tag between two ranks match in the order in which they begin. Throw Failure.
    virtual Request* send(int peer, const void* data, size_t bytes, Kind kind, uint32_t tag = 0) = 0;
    virtual Request* receive(int peer, void* data, size_t bytes, Kind kind, uint32_t tag = 0) = 0;
    void release(Request* request) { free_.push_back(request); }
    // Memory that messages use must live until they are over, also if a wait is given up.
    char* hold(size_t bytes);
    void let_go() { held_.clear(); }
    char* hold_always(size_t bytes);

    // Runs the engine until `done()`, which it asks after each progress. `deadline`: by now_ns(). A rouse
    // ends only waits that are `rousable`. Called without the GIL. Throws Failure.
    Ended wait(const std::function<bool()>& done, uint64_t deadline, bool rousable = false);
    // Whether the system has all that was sent. Until then the engine has to be called. Throws Failure.
    virtual bool flushed() = 0;
    // Waits until it has. Throws Failure.
    Ended flush(uint64_t deadline);

    // By any thread: `stop` ends all waits from now on, `rouse` the running one, or the next.
    void stop();
    void rouse();
    bool stopped() const { return stopped_.load(std::memory_order_acquire); }

    // Ends the connections and what is under way: no memory of a message is touched from then on. Returns
    // false if the engine does not let go of some; it then keeps everything, and the memory has to stay as
    // well.
    bool drop();
    // In a forked child: lets go without a word to anybody.
    void forget();

  protected:
    static constexpr uint64_t kLeaves = 2'000'000'000;  // ns that the end of a transport may take
    static constexpr uint64_t kStopped = kLeaves / 2;   // of these, in which data that came before is taken

    // `spin_ns`: for how long a wait polls before it sleeps.
    Transport(int rank, int size, uint64_t spin_ns);

    // --- what an engine does ---
    // Whether it has not ended.
    virtual bool is_open() const = 0;
    // Does what can be done now; returns whether there may be more. Throws Failure.
    virtual bool progress() = 0;
    // Called before `sleep`; false if there is something to do.
    virtual bool may_sleep() { return true; }
    // Waits until there is something to do, or somebody has written to `wake_`.
    virtual void sleep(int milliseconds) = 0;
    // Ends connections and messages, as `drop` tells. `given_up`: nobody waits for what was sent.
    virtual bool end(bool given_up) = 0;
    // Lets go of everything without freeing what may still be used. `forked`: it is the parent's as well.
    virtual void abandon(bool forked) = 0;

    // --- what engines use ---
    // A request that the engine has still to take.
    Request* begin(int peer, bool send);
    void finish(Request& request);
    // Notes that the connection to a rank has ended, which is told to who waits for that rank.
    void broke(int peer, const std::string& why);
    // Whether none has.
    bool all_connected() const { return broken_.empty(); }
    // Throws Failure if that to this rank has.
    void check_connected(int peer) const;
    void keep_for_ever(bool forked = false);

    const int rank_, size_;
    std::deque<Request> requests_;
    // Messages that have begun or completed.
    uint64_t events_ = 0;
    int wake_ = -1;  // a file for `stop` and `rouse`

  private:
    void check_broken() const;

    const uint64_t spin_ns_;
    std::vector<std::string>
        broken_;  // why the connection to each rank has ended, "" if not; empty if none has
    std::vector<Request*> free_;
    std::vector<std::unique_ptr<char[]>> held_, always_held_;
    std::mutex waking_;
    std::timed_mutex waited_in_;  // by `wait` for its duration
    std::atomic<bool> stopped_{false}, roused_{false};
};

}  // namespace unicomm::transport
