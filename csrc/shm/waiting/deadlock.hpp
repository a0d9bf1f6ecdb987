// Finds deadlocks: cycles of ranks that wait for each other, also through several communicators.
// docs/design/deadlocks.md argues why only real deadlocks are reported.
//
// Each process publishes in its wait table which rank waits for which (wait_table.hpp). A rank that has
// waited for a while follows the graph from its own wait. An awaited rank will not come if it waits in the
// same communicator in an operation that nothing can join, or if its process has promised that none of its
// threads will call there unless certain waits end. If all paths lead only to such waits and back to the own
// wait, and all of these waits have been checked again since a time at which all of them waited, the wait is
// a deadlock.
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

#include "base/error.hpp"
#include "recorder/ring.hpp"
#include "shm/memory/segment.hpp"
#include "shm/waiting/wait_table.hpp"

namespace unicomm::shm {

// Checks the threads of this process: returns whether no thread may enter communicator `comm` as `rank` as
// long as some of the `waiting` threads (pthread_self) stay where they are, and these threads in `matter`.
// May take the GIL.
using ThreadCheck = std::function<bool(uint64_t comm, int rank, const std::vector<uint64_t>& waiting,
                                       std::vector<uint64_t>& matter)>;
void set_thread_check(ThreadCheck check);

// How a rank waits.
struct WaitKind {
    uint32_t op;
    bool joinable = false;  // more messages may join the wait
    bool aside = false;     // no thread of the program waits for it: the rank may be at work elsewhere
    bool any = false;       // the wait ends when one of the awaited ranks acts ...
    bool anybody = false;   // ... or any rank at all
    bool guessed = false;   // the awaited ranks are likely to end it, but any thread may, by a plain store
};

class DeadlockDetector {
  public:
    DeadlockDetector(Segment& segment, int rank, std::string name);
    ~DeadlockDetector();
    DeadlockDetector(const DeadlockDetector&) = delete;
    DeadlockDetector& operator=(const DeadlockDetector&) = delete;

    // To be called by the waiting thread, each time it has checked what it waits for and has to go on.
    // Returns true if it would wait forever. `fault` then names the cycle, from this rank on: a claim for
    // each member (`root`: the rank it waits for, `count`: the sequence number), and a line in `detail` for
    // each: communicator, tab, file:line.
    bool check(const std::vector<int>& awaited, const WaitKind& kind, Fault& fault);
    void wait_ended();
    // To be called when the wait ends with `fault`, which another rank may have reported. Returns the fault
    // to raise: the cycle of this wait if it is known, because other members may have left the communicator
    // since.
    Fault ended_by(const Fault& fault);

    // The recorder of this communicator; null if there is none (any more).
    void recorded_in(const ring::Writer* writer, uint16_t comm);
    WaitTableRef table() const { return table_ ? table_->ref() : WaitTableRef{}; }

  private:
    struct Key {  // identifies a wait
        uint64_t table;
        int slot;
        auto operator<=>(const Key&) const = default;
    };
    // An awaited rank: it waits itself, or its process has made a promise for it.
    struct Target {
        int rank;
        std::vector<Key> waits;
        bool all = false;      // whether all of `waits` must last forever, or one is enough
        uint64_t promise = 0;  // its version; 0: none
    };
    struct Node {
        std::shared_ptr<const WaitTable> table;
        uint64_t wait = 0, looks = 0;
        Waiting what;
        std::vector<Target> targets;
        bool stuck = true;
    };
    using Graph = std::map<Key, Node>;
    struct Evidence {                                        // what the verdict depends on
        std::map<Key, std::pair<uint64_t, uint64_t>> waits;  // number of the wait, and its checks
        std::set<std::pair<uint64_t, uint64_t>> promises;    // wait table and version
        bool same(const Evidence& other) const;
    };

    void publish(const std::vector<int>& awaited, const WaitKind& kind);
    Graph build_graph(bool optimistic, std::vector<std::pair<uint64_t, int>>& own_idle) const;
    Target target(const Waiting::Awaited& awaited, uint64_t comm, bool optimistic,
                  std::vector<std::pair<uint64_t, int>>& own_idle) const;
    static void prune(Graph& graph);
    std::vector<Key> cycle(const Graph& graph) const;
    Evidence evidence(const Graph& graph, const std::vector<Key>& cycle) const;
    std::set<Key> companions(const Graph& graph, const Evidence& is) const;
    bool make_promises(const std::vector<std::pair<uint64_t, int>>& own_idle);
    enum class Others { kKnow, kWillKnow, kWentOn };
    Others others() const;
    Fault describe(const Graph& graph, const std::vector<Key>& cycle) const;
    Key mine() const { return {table_->ref().id, slot_}; }

    Segment& segment_;
    int rank_;
    std::string name_;
    std::shared_ptr<WaitTable> table_;
    Mutex recorded_mutex_;
    const ring::Writer* writer_ = nullptr;
    uint16_t recorded_as_ = 0;

    // Of the current wait:
    uint64_t began_ns_ = 0, next_ns_ = 0, next_thread_check_ns_ = 0, thread_check_pause_ns_ = 0,
             found_ns_ = 0;
    int slot_ = -1;
    uint64_t number_ = 0;
    std::vector<int> awaited_;
    bool aside_ = false;
    bool have_before_ = false, in_deadlock_ = false;
    Evidence before_;
    Fault found_;
    std::vector<std::pair<std::shared_ptr<const WaitTable>, std::pair<int, uint64_t>>> members_;
    mutable std::map<uint64_t, std::shared_ptr<const WaitTable>> tables_;
};

}  // namespace unicomm::shm
