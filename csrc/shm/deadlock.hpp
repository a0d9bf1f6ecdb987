// Whether a rank that waits will wait for ever: in a circle of ranks that wait for each other, also through
// several communicators. docs/design/deadlocks.md has the argument why none is reported that is not one.
//
// Each process publishes on its board who waits for whom (board.hpp). A rank that has waited for a while
// follows these from its own wait. What it awaits will not come when it waits in the same communicator, in an
// operation to which nothing can be added, or when its process has promised that none of its threads will
// call there unless certain waits end. When all of that leads only to such waits, and back to its own, and
// all of them have been looked at anew since a time when all waited, then it is a deadlock.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "recorder/ring.hpp"
#include "shm/board.hpp"
#include "shm/segment.hpp"

namespace unicomm::shm {

// Looks at the threads of this process: whether none of them may enter communicator `comm` as `rank` while
// some of `waiting` (threads, as pthread_self) stay where they are, which it returns in `matter`. May take
// the interpreter's lock.
using Census = std::function<bool(uint64_t comm, int rank, const std::vector<uint64_t>& waiting,
                                  std::vector<uint64_t>& matter)>;
void set_census(Census census);

// How a rank waits.
struct WaitKind {
    uint32_t op;
    bool joinable = false;  // more messages may join
    bool any = false;       // goes on when one of the awaited ranks acts ...
    bool anybody = false;   // ... or any rank at all
};

class Deadlock {
  public:
    Deadlock(Segment& segment, int rank, std::string name);
    ~Deadlock();
    Deadlock(const Deadlock&) = delete;
    Deadlock& operator=(const Deadlock&) = delete;

    // The thread that calls has looked at what it waits for, and has to go on. True when it would for ever;
    // `fault` then names the circle from this rank on: a claim for each (`root`: for whom it waits, `count`:
    // the operation's number), and in `detail` a line for each: communicator, tab, file:line.
    bool looked(const std::vector<int>& awaited, const WaitKind& kind, Fault& fault);
    void ended();  // the wait is over
    // The circle in which this wait is; it is known before it is reported, when all in it know.
    const Fault& found() const { return found_; }

    // Where the operations of this communicator are recorded; null: nowhere (any more).
    void recorded_in(const ring::Writer* writer, uint16_t comm);
    BoardRef board() const { return board_ ? board_->ref() : BoardRef{}; }

  private:
    struct Key {  // of a wait
        uint64_t board;
        int slot;
        auto operator<=>(const Key&) const = default;
    };
    // What a rank awaits: a rank that is in a wait itself, or one of which its process has said something.
    struct Target {
        int rank;
        std::vector<Key> waits;
        bool all = false;      // whether all of `waits` must be for ever, or one of them is enough
        uint64_t promise = 0;  // its version
    };
    struct Node {
        std::shared_ptr<const Board> board;
        uint64_t wait = 0, looks = 0;
        Waiting what;
        std::vector<Target> targets;
        bool stuck = true;
    };
    using Graph = std::map<Key, Node>;
    struct Certain {                                         // what the verdict rests on
        std::map<Key, std::pair<uint64_t, uint64_t>> waits;  // number and looks
        std::set<std::pair<uint64_t, uint64_t>> promises;    // board and version
        bool same(const Certain& other) const;
    };

    void publish(const std::vector<int>& awaited, const WaitKind& kind);
    Graph follow(bool hopeful, std::vector<std::pair<uint64_t, int>>& own_idle) const;
    Target target(const Waiting::Awaited& awaited, uint64_t comm, bool hopeful,
                  std::vector<std::pair<uint64_t, int>>& own_idle) const;
    static void settle(Graph& graph);
    std::vector<Key> circle(const Graph& graph) const;
    Certain certain(const Graph& graph, const std::vector<Key>& circle) const;
    std::set<Key> companions(const Graph& graph, const Certain& is) const;
    bool make_promises(const std::vector<std::pair<uint64_t, int>>& own_idle);
    enum class Others { kKnow, kWillKnow, kWentOn };
    Others others() const;
    Fault describe(const Graph& graph, const std::vector<Key>& circle) const;
    Key mine() const { return {board_->ref().id, slot_}; }

    Segment& segment_;
    int rank_;
    std::string name_;
    std::shared_ptr<Board> board_;
    std::mutex recorded_mutex_;
    const ring::Writer* writer_ = nullptr;
    uint16_t recorded_as_ = 0;

    // Of this wait:
    uint64_t began_ns_ = 0, next_ns_ = 0, next_census_ns_ = 0, census_pause_ns_ = 0, found_ns_ = 0;
    int slot_ = -1;
    uint64_t number_ = 0;
    std::vector<int> awaited_;
    bool have_before_ = false;
    Certain before_;
    Fault found_;
    std::vector<std::pair<std::shared_ptr<const Board>, std::pair<int, uint64_t>>> members_;
    mutable std::map<uint64_t, std::shared_ptr<const Board>> boards_;
};

}  // namespace unicomm::shm
