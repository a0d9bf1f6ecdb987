// Ranks as simulated processes that run a program on the core.
#include "tests/simulation/world.hpp"

#include <algorithm>

namespace unicomm::simulation {
namespace {

using shm::Group;
using shm::Message;
using shm::Segment;
using testing::Operation;
using testing::OperationRun;

// Six ranks that poll for 20 s, until their deadline, need 20 to 35 millions.
constexpr uint64_t kMostPoints = 120000000;

bool is_collective(const Operation& o) {
    return o.kind != Operation::kRing && o.kind != Operation::kChain && o.kind != Operation::kFromAny;
}

// The operation as a rank calls it that differs from the others.
Operation different(Operation o, int world) {
    switch (o.kind) {
        case Operation::kReduce:
        case Operation::kBroadcast:
        case Operation::kGather:
        case Operation::kScatter:
            o.root = (o.root + 1) % world;
            break;
        case Operation::kBarrier:
        case Operation::kMismatch:
            o.kind = Operation::kAllReduce, o.n = 1;
            break;
        default:
            ++o.n;
    }
    return o;
}

class World {
  public:
    World(const Case& c, const Scheduler::Told& told, bool each_point)
        : c_(c), scheduler_(settings(c)), doing_(kFibers, "nothing") {
        auto ranks = size_t(c.world);
        run_.steps.resize(ranks);
        run_.finished.resize(ranks);
        run_.reached.resize(c.causes.size());
        run_.aborts.resize(size_t(c.comms));
        run_.broken_at.resize(size_t(c.comms));
        groups_.resize(size_t(c.comms));
        testing::limit_ns = c.limit_ms * kMs;
        testing::on_failure = [](const std::string& what) { Scheduler::current()->give_up(what); };
        // A process has one thread that calls communicators: it waits, or may still come.
        shm::set_thread_check(
            [](uint64_t, int, const std::vector<uint64_t>& waiting, std::vector<uint64_t>& matter) {
                matter = waiting;
                return !waiting.empty();
            });
        std::vector<int> pids(ranks, int(getpid()));
        for (int comm = 0; comm < c.comms; ++comm) {
            auto segment = std::make_shared<Segment>(c.world, 4096, 4096);
            for (int r = 0; r < c.world; ++r) {
                scheduler_.create_for(r);
                groups_[size_t(comm)].push_back(
                    std::make_unique<Group>(segment, r, pids, "comm" + std::to_string(comm)));
                testing::offer_memory(*groups_[size_t(comm)].back());
            }
        }
        for (int r = 0; r < c.world; ++r) {
            scheduler_.add(r, [this, r] { program(r); });
            scheduler_.add(r + kProcesses, [this, r] { abort_all(r, r + kProcesses); });
        }
        if (told) scheduler_.tell(told, each_point, [this](int fiber) { return doing_[size_t(fiber)]; });
    }

    Run run() {
        run_.stopped = scheduler_.run();
        run_.ns = scheduler_.now() - 1000 * kMs;
        run_.points = scheduler_.points();
        run_.taken = scheduler_.taken();
        size_t event = 0;
        for (size_t i = 0; i < c_.causes.size(); ++i) {
            if (c_.causes[i].of_point()) run_.reached[i] = scheduler_.happened(event++);
        }
        for (auto& groups : groups_) {
            run_.left.emplace_back();
            for (int r = 0; r < c_.world; ++r) {
                const uint32_t state = groups[0]->segment().control(r).state.load();
                run_.left.back().push_back(state == uint32_t(shm::RankState::kFinalized));
            }
        }
        for (int r = 0; r < c_.world; ++r) {
            run_.ended_at.push_back(scheduler_.ended(r) ? std::optional(scheduler_.ended_at(r))
                                                        : std::nullopt);
            run_.stops.push_back(scheduler_.stops(r));
        }
        return run_;
    }

  private:
    static Settings settings(const Case& c) {
        Settings s = c.settings;
        uint64_t ms = 2 * c.limit_ms * (c.program.size() + 1) + 10000;
        for (const Cause& cause : c.causes) {
            ms += cause.ms;
            if (!cause.of_point()) continue;
            auto kind = cause.kind == Cause::kKill   ? Event::kEnd
                        : cause.kind == Cause::kStop ? Event::kStop
                                                     : Event::kStart;
            s.events.push_back({kind, cause.rank, cause.at, cause.ms * kMs});
        }
        s.most_ns = ms * kMs;
        s.most_points = kMostPoints;
        return s;
    }

    uint64_t now() const { return scheduler_.now(); }

    void abort_all(int rank, int fiber) {
        doing_[size_t(fiber)] = "abort";
        for (size_t comm = 0; comm < groups_.size(); ++comm) {
            run_.aborts[comm].push_back(rank);
            groups_[comm][size_t(rank)]->abort();
            broken(int(comm));
        }
    }

    void broken(int comm) {
        if (uint64_t& at = run_.broken_at[size_t(comm)]; at == 0) at = now();
    }

    // Returns whether the rank must leave.
    bool call(int rank, int index, const Operation& o, const std::function<Fault(Group&)>& body) {
        int comm = index % c_.comms;
        Group& g = *groups_[size_t(comm)][size_t(rank)];
        std::vector<Step>& steps = run_.steps[size_t(rank)];
        doing_[size_t(rank)] = std::string(Operation::kNames[o.kind]) + " " + std::to_string(index);
        steps.push_back({index, comm, now(), 0, {}});
        Fault fault = body(g);
        Step& step = steps.back();
        step.end_ns = now();
        step.fault = fault;
        doing_[size_t(rank)] = "program";
        if (!fault) return false;
        // A collective that does not fit leaves the communicator usable, and so does a message.
        if (fault.code == FaultCode::kMismatch) {
            if (is_collective(o)) return false;
            abort_all(rank, rank);
            return true;
        }
        step.broke = true;
        broken(comm);
        step.again = g.barrier(testing::op_of(OpCode::kBarrier, 0));
        step.again_ns = now();
        // Like a program that ends with an error: no operation of its other communicator can complete.
        for (int other = 0; other < c_.comms; ++other) {
            if (other == comm) continue;
            run_.aborts[size_t(other)].push_back(rank);
            groups_[size_t(other)][size_t(rank)]->abort();
            broken(other);
        }
        return true;
    }

    // Like `call`: the rank and its partner first receive from each other.
    bool cross(int rank, int partner, int index) {
        int word = 0;
        Message receive{false, partner, {reinterpret_cast<char*>(&word), sizeof word}, DType::kInt32, 1, 77};
        Operation o;
        o.kind = Operation::kChain;
        return call(rank, index, o,
                    [&](Group& g) { return g.exchange({receive}, now_ns() + testing::limit_ns); });
    }

    void program(int rank) {
        int count = int(c_.program.size());
        std::vector<int> order;
        for (int i = 0; i < count; ++i) order.push_back(i);
        for (size_t k = 0; k < c_.causes.size(); ++k) {
            const Cause& cause = c_.causes[k];
            if (cause.kind != Cause::kSwap || cause.rank != rank || int(cause.at) + 1 >= count) continue;
            std::swap(order[cause.at], order[cause.at + 1]);
            run_.reached[k] = true;
        }
        for (int index : order) {
            Operation o = c_.program[size_t(index)];
            for (size_t k = 0; k < c_.causes.size(); ++k) {
                const Cause& cause = c_.causes[k];
                bool pair = cause.kind == Cause::kCross && (cause.rank + 1) % c_.world == rank;
                if (cause.of_point() || int(cause.at) != index || (cause.rank != rank && !pair)) continue;
                run_.reached[k] = true;
                switch (cause.kind) {
                    case Cause::kDelay:
                        doing_[size_t(rank)] = "program";
                        scheduler_.pause(cause.ms * kMs);
                        break;
                    case Cause::kGone:
                        return;
                    case Cause::kFinalize:
                        return finalize(rank);
                    case Cause::kDiffer:
                        o = different(o, c_.world);
                        break;
                    case Cause::kCross: {
                        int partner = pair ? cause.rank : (rank + 1) % c_.world;
                        if (cross(rank, partner, index)) return;
                        break;
                    }
                    default:
                        break;
                }
                if (cause.kind == Cause::kSkip) o.kind = -1;
            }
            if (o.kind < 0) continue;
            if (call(rank, index, o, [&](Group& g) { return OperationRun(g, o).run(); })) return;
        }
        finalize(rank);
        run_.finished[size_t(rank)] = true;
    }

    void finalize(int rank) {
        doing_[size_t(rank)] = "finalize";
        for (auto& groups : groups_) groups[size_t(rank)]->finalize();
    }

    const Case& c_;
    Scheduler scheduler_;
    std::vector<std::string> doing_;
    std::vector<std::vector<std::unique_ptr<Group>>> groups_;
    Run run_;
};

}  // namespace

uint64_t Run::stopped_ns(int rank, uint64_t from, uint64_t to) const {
    uint64_t sum = 0;
    for (auto [begin, end] : stops[size_t(rank)]) {
        uint64_t a = std::max(begin, from), b = std::min(end, to);
        if (a < b) sum += b - a;
    }
    return sum;
}

Run run_case(const Case& c, const Scheduler::Told& told, bool each_point) {
    return World(c, told, each_point).run();
}

}  // namespace unicomm::simulation
