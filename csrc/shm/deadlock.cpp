#include "shm/deadlock.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>

#include "core/fork.hpp"

namespace unicomm::shm {
namespace {

constexpr uint64_t kMs = 1000000;
constexpr uint64_t kFirstNs = 100 * kMs;        // waits that end sooner are never shown to anybody
constexpr uint64_t kPauseNs = 40 * kMs;         // between two times that the others are looked at
constexpr uint64_t kCensusNs = 100 * kMs;       // between two censuses that said no, at first ...
constexpr uint64_t kMostCensusNs = 1600 * kMs;  // ... and at last
constexpr uint64_t kGraceNs = 10000 * kMs;      // for the others of a circle, to see it too
constexpr size_t kMostNodes = 4096;

std::mutex census_mutex;
[[maybe_unused]] const bool registered = (keep_over_fork<census_mutex>(), true);
// Never destroyed: threads may wait until the process has ended.
Census& the_census = *new Census();

void copy_text(char* to, size_t room, const std::string& text) {
    size_t n = std::min(room - 1, text.size());
    std::memset(to, 0, room);
    std::memcpy(to, text.data() + (text.size() - n), n);  // of a path, the end says more
}

std::string text_of(const char* text, size_t room) { return {text, strnlen(text, room)}; }

}  // namespace

void set_census(Census census) {
    std::lock_guard lock(census_mutex);
    the_census = std::move(census);
}

Deadlock::Deadlock(Segment& segment, int rank, std::string name)
    : segment_(segment), rank_(rank), name_(std::move(name)), board_(Board::mine()) {}

Deadlock::~Deadlock() { ended(); }

void Deadlock::recorded_in(const ring::Writer* writer, uint16_t comm) {
    std::lock_guard lock(recorded_mutex_);
    writer_ = writer;
    recorded_as_ = comm;
}

void Deadlock::ended() {
    // A child that was forked while another thread waited has the parent's board mapped.
    if (slot_ >= 0 && board_->ref().pid == getpid()) {
        WaitSlot& slot = board_->page().waits[slot_];
        if (slot.found.load() == number_) slot.left.store(number_);
        slot.waiting.withdraw();
        board_->free_slot(slot_);
    }
    slot_ = -1;
    began_ns_ = next_ns_ = found_ns_ = 0;
    have_before_ = false;
    found_ = {};
    members_.clear();
    boards_.clear();
}

void Deadlock::publish(const std::vector<int>& awaited, const WaitKind& kind) {
    Waiting w{};
    w.comm = segment_.id();
    w.thread = uint64_t(pthread_self());
    w.rank = rank_;
    w.op = kind.op;
    w.joinable = kind.joinable;
    w.any = kind.any;
    copy_text(w.name, sizeof w.name, name_);
    for (int r : awaited) {
        if (w.awaited_count == kMostAwaited) break;
        const RankControl& c = segment_.control(r);
        w.awaited[w.awaited_count++] = {{c.board.load(), int32_t(c.pid), c.board_fd.load()}, r, 0};
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
    number_ = board_->next_number();
    awaited_ = awaited;
    have_before_ = false;
    found_ns_ = 0;
    found_ = {};
    WaitSlot& slot = board_->page().waits[slot_];
    slot.looks.store(0);
    slot.waiting.publish(w, number_);
}

bool Deadlock::looked(const std::vector<int>& awaited, const WaitKind& kind, Fault& fault) {
    uint64_t now = ring::now_ns();
    if (began_ns_ == 0) {
        began_ns_ = now;
        census_pause_ns_ = kCensusNs;
    }
    // Who waits for one of too many cannot name them all.
    bool sayable = !awaited.empty() && !(kind.any && awaited.size() > kMostAwaited);
    if (!board_ || !sayable || now - began_ns_ < kFirstNs) return false;
    if (slot_ < 0 && (slot_ = board_->take_slot()) < 0) return false;
    if (number_ == 0 || board_->page().waits[slot_].waiting.version() != number_ || awaited != awaited_) {
        publish(awaited, kind);
    }
    WaitSlot& slot = board_->page().waits[slot_];
    slot.looks.fetch_add(1);
    if (now < next_ns_) return false;
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
    Graph graph = follow(false, own_idle);
    std::vector<Key> round = circle(graph);
    if (round.empty()) {
        have_before_ = false;
        // Perhaps only this process has to look at its threads.
        if (now < next_census_ns_) return false;
        own_idle.clear();
        Graph perhaps = follow(true, own_idle);
        if (own_idle.empty() || circle(perhaps).empty()) return false;
        if (make_promises(own_idle)) return false;
        next_census_ns_ = ring::now_ns() + census_pause_ns_;
        census_pause_ns_ = std::min(2 * census_pause_ns_, kMostCensusNs);
        return false;
    }
    Certain is = certain(graph, round);
    if (!have_before_ || !before_.same(is)) {
        before_ = is;
        have_before_ = true;
        return false;
    }
    for (const auto& [key, seen] : is.waits) {
        // The second look since began after all of them were seen to wait.
        if (seen.second - before_.waits[key].second < 2) return false;
    }
    found_ = describe(graph, round);
    found_ns_ = now;
    members_.clear();
    for (const Key& key : companions(graph, is)) {
        const Node& node = graph.at(key);
        members_.push_back({node.board, {key.slot, node.wait}});
    }
    slot.found.store(number_);
    next_ns_ = 0;  // the others need as long
    return false;
}

// Whether all others of the circle have found it too. Nobody leaves before: what is left would be no circle.
Deadlock::Others Deadlock::others() const {
    bool all = true;
    for (const auto& [board, of] : members_) {
        const WaitSlot& slot = board->page().waits[of.first];
        bool waits = slot.waiting.version() == of.second;
        if (!waits && slot.left.load() != of.second) return Others::kWentOn;  // its own deadline has passed
        all &= !waits || slot.found.load() == of.second;
    }
    return all ? Others::kKnow : Others::kWillKnow;
}

Deadlock::Target Deadlock::target(const Waiting::Awaited& awaited, uint64_t comm, bool hopeful,
                                  std::vector<std::pair<uint64_t, int>>& own_idle) const {
    Target t{awaited.rank, {}, false, 0};
    auto& board = boards_[awaited.board.id];
    if (!board) board = Board::open(awaited.board);
    if (!board) return t;
    uint64_t id = board->ref().id;
    Waiting other;
    std::vector<Key> any;
    for (int slot = 0; slot < kWaits; ++slot) {
        const WaitSlot& s = board->page().waits[slot];
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
        board->promise_of(comm, awaited.rank, said, version) && said.count > 0 && said.count <= kWaits;
    for (uint32_t i = 0; good && i < said.count; ++i) {
        auto slot = said.of[i].slot;
        good = slot < uint64_t(kWaits) && board->page().waits[slot].waiting.version() == said.of[i].wait;
        t.waits.push_back({id, int(slot)});
    }
    if (good) {
        t.all = true;
        t.promise = version;
        return t;
    }
    t.waits = hopeful ? any : std::vector<Key>{};
    if (id == board_->ref().id) own_idle.push_back({comm, awaited.rank});
    return t;
}

// All waits to which this one leads. `hopeful`: as if a process did whatever one of its waiting threads
// would.
Deadlock::Graph Deadlock::follow(bool hopeful, std::vector<std::pair<uint64_t, int>>& own_idle) const {
    Graph graph;
    std::deque<Key> todo{mine()};
    boards_[board_->ref().id] = board_;
    while (!todo.empty()) {
        Key key = todo.front();
        todo.pop_front();
        if (graph.count(key)) continue;
        Node& node = graph[key];
        node.board = boards_[key.board];
        const WaitSlot& slot = node.board->page().waits[key.slot];
        node.wait = slot.waiting.read(node.what);
        // Never trust a number that another process wrote.
        node.stuck = node.wait != 0 && node.what.awaited_count > 0 &&
                     node.what.awaited_count <= kMostAwaited && graph.size() <= kMostNodes;
        if (!node.stuck) continue;
        for (uint32_t i = 0; i < node.what.awaited_count; ++i) {
            node.targets.push_back(target(node.what.awaited[i], node.what.comm, hopeful, own_idle));
            for (const Key& next : node.targets.back().waits) todo.push_back(next);
        }
    }
    // All have been seen to wait: what they look at from here on, they look at while all of them wait.
    for (auto& [key, node] : graph) {
        if (!node.stuck) continue;
        const WaitSlot& slot = node.board->page().waits[key.slot];
        node.looks = slot.looks.load();
        node.stuck = slot.waiting.version() == node.wait;
    }
    settle(graph);
    return graph;
}

// Leaves as stuck what only waits for what is.
void Deadlock::settle(Graph& graph) {
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
            // What does not come to an end by itself is of no use below.
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

// The shortest way from this wait back to it.
std::vector<Deadlock::Key> Deadlock::circle(const Graph& graph) const {
    if (!graph.at(mine()).stuck) return {};
    std::map<Key, Key> from;
    std::deque<Key> todo{mine()};
    bool itself = false;  // this very thread might act for whom it awaits
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

// The waits of the circle, and those without which one of them might end.
Deadlock::Certain Deadlock::certain(const Graph& graph, const std::vector<Key>& circle) const {
    Certain is;
    std::map<Key, Key> after;
    for (size_t i = 0; i < circle.size(); ++i) after[circle[i]] = circle[(i + 1) % circle.size()];
    std::deque<Key> todo(circle.begin(), circle.end());
    while (!todo.empty()) {
        Key key = todo.front();
        todo.pop_front();
        const Node& node = graph.at(key);
        if (!is.waits.emplace(key, std::pair{node.wait, node.looks}).second) continue;
        // One awaited rank that never comes is enough, for whoever needs all of them: the circle's, or any.
        size_t chosen = 0;
        for (size_t i = 0; after.count(key) && i < node.targets.size(); ++i) {
            const auto& waits = node.targets[i].waits;
            if (std::find(waits.begin(), waits.end(), after[key]) != waits.end()) chosen = i;
        }
        for (size_t i = 0; i < node.targets.size(); ++i) {
            if (!node.what.any && i != chosen) continue;
            if (node.targets[i].promise)
                is.promises.insert({node.targets[i].waits[0].board, node.targets[i].promise});
            todo.insert(todo.end(), node.targets[i].waits.begin(), node.targets[i].waits.end());
        }
    }
    return is;
}

// Those of them that wait for this one, so that they find a circle as well. There may be more than in the
// circle that is named, where several threads might act for a rank.
std::set<Deadlock::Key> Deadlock::companions(const Graph& graph, const Certain& is) const {
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

bool Deadlock::Certain::same(const Certain& other) const {
    auto alike = [](const auto& a, const auto& b) {
        return a.first == b.first && a.second.first == b.second.first;
    };
    return promises == other.promises &&
           std::equal(waits.begin(), waits.end(), other.waits.begin(), other.waits.end(), alike);
}

// Has this process's threads looked at, for those of its ranks that others await while it calls nothing
// there.
bool Deadlock::make_promises(const std::vector<std::pair<uint64_t, int>>& own_idle) {
    Census census;
    {
        std::lock_guard lock(census_mutex);
        census = the_census;
    }
    if (!census) return false;
    std::unique_lock lock(board_->promising, std::try_to_lock);
    if (!lock) return true;  // another thread is at it
    bool good = true;
    for (auto [comm, rank] : std::set<std::pair<uint64_t, int>>(own_idle.begin(), own_idle.end())) {
        Promise promise{};
        promise.comm = comm;
        promise.rank = rank;
        std::vector<uint64_t> threads;
        Waiting w;
        for (int slot = 0; slot < kWaits; ++slot) {
            uint64_t wait = board_->page().waits[slot].waiting.read(w);
            if (wait == 0) continue;
            promise.of[promise.count++] = {wait, uint64_t(slot)};
            threads.push_back(w.thread);
        }
        std::vector<uint64_t> matter;
        bool kept = census(comm, rank, threads, matter);
        uint32_t count = 0;
        for (uint32_t i = 0; i < promise.count; ++i) {
            // All of them waited all the while.
            kept &= board_->page().waits[promise.of[i].slot].waiting.version() == promise.of[i].wait;
            bool matters = std::find(matter.begin(), matter.end(), threads[i]) != matter.end();
            if (matters) promise.of[count++] = promise.of[i];
        }
        promise.count = count;
        kept &= count > 0;
        if (kept) board_->promise(promise);
        good &= kept;
    }
    return good;
}

Fault Deadlock::describe(const Graph& graph, const std::vector<Key>& circle) const {
    Fault fault{FaultCode::kDeadlock, {}, {}, ""};
    uint64_t comm = segment_.id();
    for (size_t i = 0; i < circle.size(); ++i) {
        const Node& node = graph.at(circle[i]);
        const Waiting& w = node.what;
        const Key& next = circle[(i + 1) % circle.size()];
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
