// Follows who waits for whom to the ranks that cause a timeout.
#include "shm/waiting/culprits.hpp"

#include <algorithm>

#include "base/clock.hpp"

namespace unicomm::shm {

CulpritFinder::CulpritFinder(Segment& segment, int rank) : segment_(segment), rank_(rank) {}

std::vector<uint32_t> CulpritFinder::snapshot() const {
    std::vector<uint32_t> all;
    for (int r = 0; r < segment_.layout().world; ++r) all.push_back(segment_.control(r).looks.load());
    return all;
}

void CulpritFinder::note_look(const std::vector<int>& awaited) {
    RankControl& me = segment_.control(rank_);
    me.waits_for.store(awaited.empty() ? 0 : 1 + uint32_t(awaited.front()));
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
    int peer = static_cast<int>(segment_.control(rank).waits_for.load()) - 1;
    // Never trust a number that another process wrote.
    return peer < segment_.layout().world && waiting(rank) ? peer : -1;
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
