// Finds cycles in the graph of waits.
#include "shm/waiting/deadlock.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>

#include "base/clock.hpp"
#include "base/fork.hpp"

namespace unicomm::shm {
namespace {

constexpr uint64_t kMs = 1000000;
constexpr uint64_t kFirstNs = 100 * kMs;                // shorter waits are never published
constexpr uint64_t kPauseNs = 40 * kMs;                 // between two looks at the other waits
constexpr uint64_t kThreadCheckNs = 100 * kMs;          // between two thread checks that failed, at first ...
constexpr uint64_t kLongestThreadCheckNs = 1600 * kMs;  // ... and at most
constexpr uint64_t kGraceNs = 10000 * kMs;              // time for the other members of the cycle to find it
constexpr size_t kMostNodes = 4096;

std::mutex thread_check_mutex;
[[maybe_unused]] const bool registered = (keep_over_fork<thread_check_mutex>(), true);
// Never destroyed: threads may wait until the process has ended.
ThreadCheck& thread_check = *new ThreadCheck();

void copy_text(char* to, size_t room, const std::string& text) {
    size_t n = std::min(room - 1, text.size());
    std::memset(to, 0, room);
    std::memcpy(to, text.data() + (text.size() - n), n);  // of a path, the end says more
}

std::string text_of(const char* text, size_t room) { return {text, strnlen(text, room)}; }

}  // namespace

void set_thread_check(ThreadCheck check) {
    std::lock_guard lock(thread_check_mutex);
    thread_check = std::move(check);
}

DeadlockDetector::DeadlockDetector(Segment& segment, int rank, std::string name)
    : segment_(segment), rank_(rank), name_(std::move(name)), table_(WaitTable::mine()) {}

DeadlockDetector::~DeadlockDetector() { wait_ended(); }

void DeadlockDetector::recorded_in(const ring::Writer* writer, uint16_t comm) {
    std::lock_guard lock(recorded_mutex_);
    writer_ = writer;
    recorded_as_ = comm;
}

void DeadlockDetector::wait_ended() {
    // A child that was forked while another thread waited has the wait table of its parent mapped.
    if (slot_ >= 0 && table_->ref().pid == getpid()) {
        WaitSlot& slot = table_->page().waits[slot_];
        if (in_deadlock_ || slot.found.load() == number_) slot.left.store(number_);
        slot.waiting.withdraw();
        table_->free_slot(slot_);
    }
    slot_ = -1;
    began_ns_ = next_ns_ = found_ns_ = 0;
    have_before_ = in_deadlock_ = false;
    found_ = {};
    members_.clear();
    tables_.clear();
}

// A wait can be in two cycles. When the members of one have left, this rank is told of their deadlock, often
// before it has found the other cycle. It leaves as a member of a deadlock all the same: the members of the
// other cycle would otherwise take it for a rank that goes on, and drop what they have found.
Fault DeadlockDetector::ended_by(const Fault& fault) {
    in_deadlock_ = fault.code == FaultCode::kDeadlock;
    if (fault && slot_ >= 0 && table_->ref().pid == getpid()) {
        table_->page().waits[slot_].failed.store(number_);
    }
    return found_ ? found_ : fault;
}

void DeadlockDetector::publish(const std::vector<int>& awaited, const WaitKind& kind) {
    Waiting w{};
    w.comm = segment_.id();
    w.thread = uint64_t(pthread_self());
    w.rank = rank_;
    w.op = kind.op;
    w.joinable = kind.joinable;
    w.aside = kind.aside;
    w.any = kind.any;
    w.open = kind.guessed;
    copy_text(w.name, sizeof w.name, name_);
    for (int r : awaited) {
        if (w.awaited_count == kMostAwaited) break;
        const RankControl& c = segment_.control(r);
        w.awaited[w.awaited_count++] = {{c.wait_table.load(), int32_t(c.pid), c.wait_table_fd.load()}, r, 0};
    }
    {
        std::lock_guard lock(recorded_mutex_);
        ring::Pending at;
        if (writer_ && writer_->pending(recorded_as_, at)) {
            w.seq = at.seq;
            w.line = at.line;
            copy_text(w.file, sizeof w.file, at.file);
        }
    }
    number_ = table_->next_number();
    awaited_ = awaited;
    aside_ = kind.aside;
    have_before_ = false;
    found_ns_ = 0;
    found_ = {};
    WaitSlot& slot = table_->page().waits[slot_];
    slot.looks.store(0);
    slot.waiting.publish(w, number_);
}

bool DeadlockDetector::check(const std::vector<int>& awaited, const WaitKind& kind, Fault& fault) {
    uint64_t now = now_ns();
    if (began_ns_ == 0) {
        began_ns_ = now;
        thread_check_pause_ns_ = kThreadCheckNs;
    }
    // A wait for any of too many ranks cannot name them all.
    bool sayable = !awaited.empty() && !(kind.any && awaited.size() > kMostAwaited);
    if (!table_ || !sayable || now - began_ns_ < kFirstNs) return false;
    if (slot_ < 0 && (slot_ = table_->take_slot()) < 0) return false;
    if (number_ == 0 || table_->page().waits[slot_].waiting.version() != number_ || awaited != awaited_ ||
        kind.aside != aside_) {
        publish(awaited, kind);
    }
    WaitSlot& slot = table_->page().waits[slot_];
    slot.looks.fetch_add(1);
    if (kind.guessed || now < next_ns_) return false;
    next_ns_ = now + kPauseNs;

    if (found_ns_ != 0) {
        Others they = others();
        if (they == Others::kKnow || (they == Others::kWillKnow && now - found_ns_ >= kGraceNs)) {
            fault = found_;
            return true;
        }
        if (they == Others::kWillKnow) return false;
        slot.found.store(0);
        found_ns_ = 0;
        found_ = {};
        have_before_ = false;
    }
    std::vector<std::pair<uint64_t, int>> own_idle;
    Graph graph = build_graph(false, own_idle);
    std::vector<Key> round = cycle(graph);
    if (round.empty()) {
        have_before_ = false;
        // A check of the threads of this process may complete the cycle.
        if (now < next_thread_check_ns_) return false;
        own_idle.clear();
        Graph perhaps = build_graph(true, own_idle);
        if (own_idle.empty() || cycle(perhaps).empty()) return false;
        if (make_promises(own_idle)) return false;
        next_thread_check_ns_ = now_ns() + thread_check_pause_ns_;
        thread_check_pause_ns_ = std::min(2 * thread_check_pause_ns_, kLongestThreadCheckNs);
        return false;
    }
    Evidence is = evidence(graph, round);
    if (!have_before_ || !before_.same(is)) {
        before_ = is;
        have_before_ = true;
        return false;
    }
    for (const auto& [key, seen] : is.waits) {
        // The wait was checked twice since, so once entirely after all of them were seen to wait.
        if (seen.second - before_.waits[key].second < 2) return false;
    }
    found_ = describe(graph, round);
    found_ns_ = now;
    members_.clear();
    for (const Key& key : companions(graph, is)) {
        const Node& node = graph.at(key);
        members_.push_back({node.table, {key.slot, node.wait}});
    }
    slot.found.store(number_);
    next_ns_ = 0;  // the other members need about as long
    return false;
}

// Whether all other members of the cycle have found it, too. No member leaves before: the rest would no
// longer be a cycle.
DeadlockDetector::Others DeadlockDetector::others() const {
    bool all = true;
    for (const auto& [table, of] : members_) {
        const WaitSlot& slot = table->page().waits[of.first];
        bool waits = slot.waiting.version() == of.second;
        if (!waits && slot.left.load() != of.second) return Others::kWentOn;  // its own deadline has passed
        all &= !waits || slot.found.load() == of.second;
    }
    return all ? Others::kKnow : Others::kWillKnow;
}

DeadlockDetector::Target DeadlockDetector::target(const Waiting::Awaited& awaited, uint64_t comm,
                                                  bool optimistic,
                                                  std::vector<std::pair<uint64_t, int>>& own_idle) const {
    Target t{awaited.rank, {}, false, 0};
    auto& table = tables_[awaited.table.id];
    if (!table) table = WaitTable::open(awaited.table);
    if (!table) return t;
    uint64_t id = table->ref().id;
    Waiting other;
    std::vector<Key> any;
    for (int slot = 0; slot < kWaits; ++slot) {
        const WaitSlot& s = table->page().waits[slot];
        if (s.waiting.version() == 0 || s.waiting.read(other) == 0) continue;
        any.push_back({id, slot});
        if (other.comm == comm && other.rank == awaited.rank && !other.joinable) {
            t.waits = {{id, slot}};
            t.all = true;
            return t;
        }
    }
    Promise said;
    uint64_t version = 0;
    bool good =
        table->promise_of(comm, awaited.rank, said, version) && said.count > 0 && said.count <= kWaits;
    for (uint32_t i = 0; good && i < said.count; ++i) {
        auto slot = said.of[i].slot;
        good = slot < uint64_t(kWaits) && table->page().waits[slot].waiting.version() == said.of[i].wait;
        t.waits.push_back({id, int(slot)});
    }
    if (good) {
        t.all = true;
        t.promise = version;
        return t;
    }
    t.waits = optimistic ? any : std::vector<Key>{};
    if (id == table_->ref().id) own_idle.push_back({comm, awaited.rank});
    return t;
}

// Builds the graph of all waits that this wait leads to. `optimistic`: assumes that each process acts for a
// rank only through one of its waiting threads.
DeadlockDetector::Graph DeadlockDetector::build_graph(bool optimistic,
                                                      std::vector<std::pair<uint64_t, int>>& own_idle) const {
    Graph graph;
    std::deque<Key> todo{mine()};
    tables_[table_->ref().id] = table_;
    while (!todo.empty()) {
        Key key = todo.front();
        todo.pop_front();
        if (graph.count(key)) continue;
        Node& node = graph[key];
        node.table = tables_[key.table];
        const WaitSlot& slot = node.table->page().waits[key.slot];
        node.wait = slot.waiting.read(node.what);
        // Never trust a number that another process wrote.
        node.stuck = node.wait != 0 && node.what.open == 0 && node.what.awaited_count > 0 &&
                     node.what.awaited_count <= kMostAwaited && graph.size() <= kMostNodes;
        if (!node.stuck) continue;
        for (uint32_t i = 0; i < node.what.awaited_count; ++i) {
            node.targets.push_back(target(node.what.awaited[i], node.what.comm, optimistic, own_idle));
            for (const Key& next : node.targets.back().waits) todo.push_back(next);
        }
    }
    // All were seen to wait. A check that is counted from here on happens while all of them wait.
    for (auto& [key, node] : graph) {
        if (!node.stuck) continue;
        const WaitSlot& slot = node.table->page().waits[key.slot];
        node.looks = slot.looks.load();
        node.stuck = slot.waiting.version() == node.wait;
    }
    prune(graph);
    return graph;
}

// Keeps as stuck only the waits that depend on stuck waits alone.
void DeadlockDetector::prune(Graph& graph) {
    auto never = [&](const Target& t) {
        auto stuck = [&](const Key& k) { return graph.at(k).stuck; };
        if (t.waits.empty()) return false;
        return t.all ? std::all_of(t.waits.begin(), t.waits.end(), stuck)
                     : std::any_of(t.waits.begin(), t.waits.end(), stuck);
    };
    for (bool changed = true; changed;) {
        changed = false;
        for (auto& [key, node] : graph) {
            if (!node.stuck) continue;
            // Targets that will end by themselves are moved behind.
            auto hopeless = std::partition(node.targets.begin(), node.targets.end(), never);
            bool all = hopeless == node.targets.end(), some = hopeless != node.targets.begin();
            if (node.what.any ? all : some) continue;
            node.stuck = false;
            changed = true;
        }
    }
    for (auto& [key, node] : graph) {
        if (!node.stuck) continue;
        node.targets.erase(std::partition(node.targets.begin(), node.targets.end(), never),
                           node.targets.end());
    }
}

// Returns the shortest path from this wait back to it.
std::vector<DeadlockDetector::Key> DeadlockDetector::cycle(const Graph& graph) const {
    if (!graph.at(mine()).stuck) return {};
    std::map<Key, Key> from;
    std::deque<Key> todo{mine()};
    bool itself = false;  // this thread itself might act for the rank that it awaits
    while (!todo.empty()) {
        Key key = todo.front();
        todo.pop_front();
        for (const Target& t : graph.at(key).targets) {
            for (const Key& next : t.waits) {
                if (!graph.at(next).stuck || from.count(next)) continue;
                if (key == mine() && next == key) {
                    itself = true;
                    continue;
                }
                from[next] = key;
                if (next == mine()) {
                    std::vector<Key> way{key};
                    while (way.back() != mine()) way.push_back(from[way.back()]);
                    std::reverse(way.begin(), way.end());
                    return way;
                }
                todo.push_back(next);
            }
        }
    }
    return itself ? std::vector<Key>{mine()} : std::vector<Key>{};
}

// The waits of the cycle, and those without which one of them might end.
DeadlockDetector::Evidence DeadlockDetector::evidence(const Graph& graph,
                                                      const std::vector<Key>& cycle) const {
    Evidence is;
    std::map<Key, Key> after;
    for (size_t i = 0; i < cycle.size(); ++i) after[cycle[i]] = cycle[(i + 1) % cycle.size()];
    std::deque<Key> todo(cycle.begin(), cycle.end());
    while (!todo.empty()) {
        Key key = todo.front();
        todo.pop_front();
        const Node& node = graph.at(key);
        if (!is.waits.emplace(key, std::pair{node.wait, node.looks}).second) continue;
        // If a wait needs all its ranks, one rank that never comes is enough: the one in the cycle, or any.
        size_t chosen = 0;
        for (size_t i = 0; after.count(key) && i < node.targets.size(); ++i) {
            const auto& waits = node.targets[i].waits;
            if (std::find(waits.begin(), waits.end(), after[key]) != waits.end()) chosen = i;
        }
        for (size_t i = 0; i < node.targets.size(); ++i) {
            if (!node.what.any && i != chosen) continue;
            if (node.targets[i].promise)
                is.promises.insert({node.targets[i].waits[0].table, node.targets[i].promise});
            todo.insert(todo.end(), node.targets[i].waits.begin(), node.targets[i].waits.end());
        }
    }
    return is;
}

// The waits among the evidence that wait for this one, so they find a cycle as well. If several threads might
// act for a rank, there may be more of them than the reported cycle names.
std::set<DeadlockDetector::Key> DeadlockDetector::companions(const Graph& graph, const Evidence& is) const {
    std::map<Key, std::vector<Key>> waiters;
    for (const auto& [key, seen] : is.waits) {
        for (const Target& t : graph.at(key).targets) {
            for (const Key& next : t.waits) waiters[next].push_back(key);
        }
    }
    std::set<Key> found{mine()};
    std::deque<Key> todo{mine()};
    while (!todo.empty()) {
        for (const Key& key : waiters[todo.front()]) {
            if (found.insert(key).second) todo.push_back(key);
        }
        todo.pop_front();
    }
    return found;
}

bool DeadlockDetector::Evidence::same(const Evidence& other) const {
    auto alike = [](const auto& a, const auto& b) {
        return a.first == b.first && a.second.first == b.second.first;
    };
    return promises == other.promises &&
           std::equal(waits.begin(), waits.end(), other.waits.begin(), other.waits.end(), alike);
}

// Checks the threads of this process for its ranks that others await while they call nothing there.
bool DeadlockDetector::make_promises(const std::vector<std::pair<uint64_t, int>>& own_idle) {
    ThreadCheck check;
    {
        std::lock_guard lock(thread_check_mutex);
        check = thread_check;
    }
    if (!check) return false;
    std::unique_lock lock(table_->promising, std::try_to_lock);
    if (!lock) return true;  // another thread does it
    bool good = true;
    for (auto [comm, rank] : std::set<std::pair<uint64_t, int>>(own_idle.begin(), own_idle.end())) {
        Promise promise{};
        promise.comm = comm;
        promise.rank = rank;
        std::vector<uint64_t> threads;
        Waiting w;
        for (int slot = 0; slot < kWaits; ++slot) {
            uint64_t wait = table_->page().waits[slot].waiting.read(w);
            if (wait == 0) continue;
            promise.of[promise.count++] = {wait, uint64_t(slot)};
            threads.push_back(w.thread);
        }
        std::vector<uint64_t> matter;
        bool kept = check(comm, rank, threads, matter);
        uint32_t count = 0;
        for (uint32_t i = 0; i < promise.count; ++i) {
            // All of them waited all the time.
            kept &= table_->page().waits[promise.of[i].slot].waiting.version() == promise.of[i].wait;
            bool matters = std::find(matter.begin(), matter.end(), threads[i]) != matter.end();
            if (matters) promise.of[count++] = promise.of[i];
        }
        promise.count = count;
        kept &= count > 0;
        if (kept) table_->promise(promise);
        good &= kept;
    }
    return good;
}

Fault DeadlockDetector::describe(const Graph& graph, const std::vector<Key>& cycle) const {
    Fault fault{FaultCode::kDeadlock, {}, {}, ""};
    uint64_t comm = segment_.id();
    for (size_t i = 0; i < cycle.size(); ++i) {
        const Node& node = graph.at(cycle[i]);
        const Waiting& w = node.what;
        const Key& next = cycle[(i + 1) % cycle.size()];
        int awaited = -1;
        for (const Target& t : node.targets) {
            if (std::find(t.waits.begin(), t.waits.end(), next) != t.waits.end()) {
                awaited = t.rank;
                break;
            }
        }
        fault.claims.push_back({w.rank, w.op, 0, 0, awaited, w.seq, 0});
        std::string file = text_of(w.file, sizeof w.file);
        fault.detail += text_of(w.name, sizeof w.name) + "\t";
        if (!file.empty()) fault.detail += file + ":" + std::to_string(w.line);
        fault.detail += "\n";
        if (w.comm != comm) continue;
        for (int r : {w.rank, awaited}) {
            bool known = std::find(fault.culprits.begin(), fault.culprits.end(), r) != fault.culprits.end();
            if (!known && r >= 0 && r < segment_.layout().world) fault.culprits.push_back(r);
        }
    }
    std::sort(fault.culprits.begin(), fault.culprits.end());
    return fault;
}

}  // namespace unicomm::shm
