// Follows who waits for whom to the ranks that cause a timeout.
#include "shm/waiting/culprits.hpp"

#include <algorithm>

#include "base/clock.hpp"

namespace unicomm::shm {

namespace {

constexpr uint32_t kAnybody = ~uint32_t{0};  // in `waits_for`

}  // namespace

CulpritFinder::CulpritFinder(Segment& segment, int rank) : segment_(segment), rank_(rank) {}

std::vector<uint32_t> CulpritFinder::snapshot() const {
    std::vector<uint32_t> all;
    for (int r = 0; r < segment_.layout().world; ++r) all.push_back(segment_.control(r).looks.load());
    return all;
}

void CulpritFinder::note_look(const std::vector<int>& awaited, bool anybody, bool aside) {
    RankControl& me = segment_.control(rank_);
    uint32_t first = awaited.empty() ? 0 : 1 + uint32_t(awaited.front());
    me.waits_for.store(aside ? 0 : anybody ? kAnybody : first);
    me.looks.fetch_add(1);
    uint64_t now = now_ns();
    if (wait_ != me.wait.load() || older_.empty()) {
        wait_ = me.wait.load();
        older_ = newer_ = snapshot();
        began_ns_ = newer_at_ns_ = now;
        elsewhere_.assign(size_t(segment_.layout().world), {});
        tables_.clear();
        waits_and_looks_.clear();
    } else if (now - newer_at_ns_ > kWindowNs) {
        older_ = std::move(newer_);
        newer_ = snapshot();
        newer_at_ns_ = now;
    }
    if (now - began_ns_ > kWindowNs) look_elsewhere(now);
}

void CulpritFinder::look_elsewhere(uint64_t now) {
    for (int r = 0; r < segment_.layout().world; ++r) {
        if (r == rank_ || waiting(r)) continue;
        auto [table, unknown] = tables_.try_emplace(r);
        if (unknown) table->second = table_of(r);
        if (!table->second) continue;
        for (int slot = 0; slot < kWaits; ++slot) {
            const WaitSlot& other = table->second->page().waits[slot];
            std::pair<uint64_t, uint64_t> now_is{other.waiting.version(), other.looks.load()};
            if (now_is.first == 0) continue;
            std::pair<uint64_t, uint64_t>& before = waits_and_looks_[{r, slot}];
            bool goes_on = before.first == now_is.first && before.second != now_is.second;
            before = now_is;
            Waiting wait;
            if (!goes_on || other.waiting.read(wait) != now_is.first || wait.aside) continue;
            int peer = awaited_rank(wait);
            if (peer >= 0 && peer != r) elsewhere_[size_t(r)] = {peer, slot, now_is.first, now};
        }
    }
}

// Ranks that share a process share its table, which does not say of which of them a wait is.
std::shared_ptr<const WaitTable> CulpritFinder::table_of(int rank) const {
    const RankControl& c = segment_.control(rank);
    uint64_t id = c.wait_table.load();
    for (int r = 0; r < segment_.layout().world; ++r) {
        if (r != rank && segment_.control(r).wait_table.load() == id) return nullptr;
    }
    return WaitTable::open({id, int32_t(c.pid), c.wait_table_fd.load()});
}

int CulpritFinder::awaited_rank(const Waiting& wait) const {
    int found = -1;
    for (uint32_t i = 0; i < std::min(wait.awaited_count, uint32_t(kMostAwaited)); ++i) {
        uint64_t table = wait.awaited[i].table.id;
        for (int r = 0; table != 0 && r < segment_.layout().world; ++r) {
            if (segment_.control(r).wait_table.load() != table) continue;
            if (!waiting(r)) return r;
            found = r;
        }
    }
    return found;
}

// A wait that has ended with a fault counts on: that rank does not tell the fault here before it has looked
// for the cause itself, which can take seconds.
int CulpritFinder::elsewhere(int rank) const {
    if (rank == rank_ || elsewhere_.empty()) return -1;
    const Elsewhere& wait = elsewhere_[size_t(rank)];
    if (wait.seen_ns == 0) return -1;
    const WaitSlot& slot = tables_.at(rank)->page().waits[wait.slot];
    return now_ns() - wait.seen_ns < kWindowNs || slot.failed.load() == wait.number ? wait.awaited : -1;
}

bool CulpritFinder::waiting(int rank) const {
    const RankControl& c = segment_.control(rank);
    bool here = c.state.load() == static_cast<uint32_t>(RankState::kHere);
    return here && !older_.empty() && c.waits_for.load() != 0 &&
           (rank == rank_ || c.looks.load() != older_[size_t(rank)]);
}

int CulpritFinder::next(int rank) const {
    uint32_t waits_for = segment_.control(rank).waits_for.load();
    if (!waiting(rank)) return elsewhere(rank);
    if (waits_for == kAnybody) {
        std::vector<int> behind = responsible_for_any(rank);
        return behind.empty() ? -1 : behind.front();
    }
    int peer = static_cast<int>(waits_for) - 1;
    // Never trust a number that another process wrote.
    return peer < segment_.layout().world ? peer : -1;
}

std::vector<int> CulpritFinder::responsible_for_any(int rank) const {
    std::vector<int> idle, away, left, here;
    for (int r = 0; r < segment_.layout().world; ++r) {
        auto state = static_cast<RankState>(segment_.control(r).state.load());
        if (r == rank) continue;
        if (state == RankState::kFinalized) left.push_back(r);
        if (state != RankState::kHere) continue;
        here.push_back(r);
        if (r != rank_ && !waiting(r)) (elsewhere(r) < 0 ? idle : away).push_back(r);
    }
    for (const std::vector<int>* ranks : {&idle, &away, &left}) {
        if (!ranks->empty()) return *ranks;
    }
    return here;
}

std::vector<int> CulpritFinder::responsible(const std::vector<int>& awaited) const {
    std::vector<int> out, ends;
    for (int r : awaited) {
        int at = r, steps = 0;
        bool back = false;
        for (int to = next(at); to >= 0 && steps <= segment_.layout().world && !back; to = next(at)) {
            at = to;
            ++steps;
            back = at == r;
        }
        if (steps == 0 || back) out.push_back(r);
        if (next(at) < 0 && at != rank_) ends.push_back(at);
    }
    if (out.empty()) out = ends;
    std::sort(out.begin(), out.end());
    out.erase(std::unique(out.begin(), out.end()), out.end());
    return out.empty() ? awaited : out;
}

}  // namespace unicomm::shm
