// Moves ranks to other cores.
#include "shm/waiting/placement.hpp"

#include <sched.h>
#include <unistd.h>

#include <map>

#include "base/clock.hpp"
#include "base/simulation.hpp"

namespace unicomm::shm {
namespace {

constexpr uint64_t kStaysNs = 20000000;        // between two looks for another core
constexpr uint64_t kTakenStaysNs = 300000000;  // after a move to a core that a foreign process has

// 1 + the core that this thread is on.
uint32_t this_core() {
    if constexpr (simulation::kOn) return 0;
    return static_cast<uint32_t>(sched_getcpu() + 1);
}

}  // namespace

int usable_cores() {
    if constexpr (simulation::kOn) return simulation::cores();
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
}

Placement::Placement(Segment& segment, int rank)
    : segment_(segment), rank_(rank), cores_(usable_cores()), crowded_(segment.layout().world > cores_) {}

void Placement::taken(uint64_t now_ns) {
    if (now_ns < moved_ns_ + kStaysNs) stays_ns_ = now_ns + kTakenStaysNs;
}

void Placement::write_core() {
    const uint32_t core = this_core();
    if (core == core_) return;
    core_ = core;
    segment_.control(rank_).core.store(core, std::memory_order_relaxed);
}

// The kernel may leave three ranks on one core and one on another for tens of milliseconds, as no core is
// idle. So the last rank of a core with more than its part moves to the emptiest one. The kernel may have had
// a reason that is not known here, such as another process: it is overruled now and then only.
bool Placement::spread() {
    if (core_ == 0) return false;  // the system does not tell
    const int world = segment_.layout().world;
    auto core_of = [&](int r) { return segment_.control(r).core.load(std::memory_order_relaxed); };
    int here = 0;
    for (int r = 0; r < world; ++r) {
        if (core_of(r) != core_) continue;
        if (r > rank_) return false;
        ++here;
    }
    const uint64_t now = now_ns();
    if (here <= (world + cores_ - 1) / cores_ || now < stays_ns_) return false;
    stays_ns_ = now + kStaysNs;
    cpu_set_t allowed, there;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
    std::map<uint32_t, int> ranks;  // of each core
    for (int r = 0; r < world; ++r) ++ranks[core_of(r)];
    uint32_t emptiest = core_;
    for (uint32_t core = 1; core <= CPU_SETSIZE; ++core) {
        if (CPU_ISSET(core - 1, &allowed) && ranks[core] < ranks[emptiest]) emptiest = core;
    }
    if (ranks[emptiest] + 1 >= here) return false;
    CPU_ZERO(&there);
    CPU_SET(emptiest - 1, &there);
    if (sched_setaffinity(0, sizeof there, &there) == 0) sched_setaffinity(0, sizeof allowed, &allowed);
    write_core();
    moved_ns_ = now;
    return true;
}

}  // namespace unicomm::shm
