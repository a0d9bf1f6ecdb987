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

void CulpritFinder::note_look(const std::vector<int>& awaited, bool anybody) {
    RankControl& me = segment_.control(rank_);
    me.waits_for.store(anybody ? kAnybody : awaited.empty() ? 0 : 1 + uint32_t(awaited.front()));
    me.looks.fetch_add(1);
    uint64_t now = now_ns();
    if (wait_ != me.wait.load() || older_.empty()) {
        wait_ = me.wait.load();
        older_ = newer_ = snapshot();
        newer_at_ns_ = now;
    } else if (now - newer_at_ns_ > kWindowNs) {
        older_ = std::move(newer_);
        newer_ = snapshot();
        newer_at_ns_ = now;
    }
}

bool CulpritFinder::waiting(int rank) const {
    const RankControl& c = segment_.control(rank);
    bool here = c.state.load() == static_cast<uint32_t>(RankState::kHere);
    return here && !older_.empty() && c.waits_for.load() != 0 &&
           (rank == rank_ || c.looks.load() != older_[size_t(rank)]);
}

int CulpritFinder::next(int rank) const {
    uint32_t waits_for = segment_.control(rank).waits_for.load();
    if (!waiting(rank)) return -1;
    if (waits_for == kAnybody) {
        std::vector<int> behind = responsible_for_any(rank);
        return behind.empty() ? -1 : behind.front();
    }
    int peer = static_cast<int>(waits_for) - 1;
    // Never trust a number that another process wrote.
    return peer < segment_.layout().world ? peer : -1;
}

std::vector<int> CulpritFinder::responsible_for_any(int rank) const {
    std::vector<int> idle, left, here;
    for (int r = 0; r < segment_.layout().world; ++r) {
        auto state = static_cast<RankState>(segment_.control(r).state.load());
        if (r == rank) continue;
        if (state == RankState::kFinalized) left.push_back(r);
        if (state != RankState::kHere) continue;
        here.push_back(r);
        if (r != rank_ && !waiting(r)) idle.push_back(r);
    }
    return !idle.empty() ? idle : !left.empty() ? left : here;
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
