// Checks a run: data, ends, deadlines, culprits, agreement.
#include "tests/simulation/properties.hpp"

#include <algorithm>
#include <cstdio>
#include <set>

namespace unicomm::simulation {
namespace {

using testing::Operation;
using Ranks = std::set<int>;

// A waiting rank looks every 50 ms; the rest is for the ranks that run meanwhile.
constexpr uint64_t kNoticeNs = 300 * kMs;
constexpr uint64_t kDeathNs = 1000 * kMs;
// Shorter deadlines pass before a rank knows which others wait, and on which rank they wait.
constexpr uint64_t kTellingMs = 1000;

const char* name_of(FaultCode code) {
    static const char* const names[] = {"none",    "timeout",  "peer lost", "mismatch",
                                        "aborted", "internal", "deadlock",  "unsupported"};
    return names[int(code)];
}

std::string described(const Fault& fault) {
    std::string text = name_of(fault.code);
    for (int r : fault.culprits) text += " " + std::to_string(r);
    return fault.detail.empty() ? text : text + " (" + fault.detail.substr(0, fault.detail.find('\n')) + ")";
}

bool within(const std::vector<int32_t>& ranks, const Ranks& allowed) {
    return std::all_of(ranks.begin(), ranks.end(), [&](int r) { return allowed.count(r) != 0; });
}

bool meets(const std::vector<int32_t>& ranks, const Ranks& some) {
    return std::any_of(ranks.begin(), ranks.end(), [&](int r) { return some.count(r) != 0; });
}

class Check {
  public:
    Check(const Case& c, const Run& run, bool deaths) : c_(c), run_(run), deaths_(deaths) {
        for (size_t i = 0; i < c.causes.size(); ++i) {
            if (!run.reached[i]) continue;
            const Cause& cause = c.causes[i];
            ++causes_;
            guilty_.insert(cause.rank);
            kinds_.insert(cause.kind);
            if (cause.kind == Cause::kCross) guilty_.insert((cause.rank + 1) % c.world);
            if (cause.kind == Cause::kKill) killed_.insert(cause.rank);
            if (cause.kind == Cause::kFinalize) left_.insert(cause.rank);
            // A rank that leaves out an operation is through with its program too early.
            if (cause.kind == Cause::kSkip || cause.kind == Cause::kCross) left_.insert(cause.rank);
        }
    }

    std::optional<Violation> first() {
        if (!run_.stopped.empty()) {
            bool data = run_.stopped.find("used up") == std::string::npos;
            return Violation{data ? "data" : "end", run_.stopped};
        }
        for (int r = 0; r < c_.world; ++r) {
            for (const Step& step : run_.steps[size_t(r)]) {
                if (step.end_ns == 0) {
                    if (run_.ended_at[size_t(r)]) continue;
                    return Violation{"end", "rank " + std::to_string(r) + " is still in an operation"};
                }
                if (auto v = on_time(r, step)) return v;
                if (!step.fault) {
                    if (auto v = may_succeed(r, step)) return v;
                    continue;
                }
                if (auto v = truthful(r, step)) return v;
                if (auto v = stays(r, step)) return v;
            }
        }
        if (auto v = agreement()) return v;
        return success();
    }

  private:
    bool any(std::initializer_list<int> kinds) const {
        return std::any_of(kinds.begin(), kinds.end(), [&](int kind) { return kinds_.count(kind) != 0; });
    }
    bool has(int operation) const {
        return std::any_of(c_.program.begin(), c_.program.end(),
                           [&](const Operation& o) { return o.kind == operation; });
    }
    // Whether a timeout may name these ranks though some did all they should. A rank that waits in another
    // communicator is not known to wait. For a receive from any rank, one that has left may be at fault.
    bool vague(const std::vector<int32_t>& culprits) const {
        return c_.comms > 1 ||
               (has(Operation::kFromAny) && std::all_of(culprits.begin(), culprits.end(), [&](int r) {
                    return guilty_.count(r) != 0 || run_.finished[size_t(r)];
                }));
    }
    // Whether the rank left its last operation with a fault.
    bool waited(int rank) const {
        const std::vector<Step>& steps = run_.steps[size_t(rank)];
        return !steps.empty() && (steps.back().fault || steps.back().end_ns == 0);
    }
    std::string who(int rank, const Step& step) const {
        const Operation& o = c_.program[size_t(step.operation)];
        return "rank " + std::to_string(rank) + " in " + Operation::kNames[o.kind] + " " +
               std::to_string(step.operation) + ": " + described(step.fault);
    }
    Violation says(const char* property, int rank, const Step& step, const std::string& what) const {
        return {property, who(rank, step) + "; " + what};
    }

    std::optional<Violation> on_time(int rank, const Step& step) const {
        auto late = [&](uint64_t from, uint64_t allowed) {
            from = std::max(from, step.begin_ns);
            return step.end_ns > from + allowed + run_.stopped_ns(rank, from, step.end_ns);
        };
        if (late(step.begin_ns, 2 * c_.limit_ms * kMs + kNoticeNs)) {
            return says("deadline", rank, step, "it ended too late after its deadline");
        }
        uint64_t broken = run_.broken_at[size_t(step.comm)];
        if (broken != 0 && late(broken, kNoticeNs)) {
            return says("notice", rank, step, "it ended too late after the first rank had a fault");
        }
        for (int killed : killed_) {
            uint64_t at = *run_.ended_at[size_t(killed)];
            // One that was killed after it had finalized had left.
            if (run_.left[size_t(step.comm)][size_t(killed)]) continue;
            if (deaths_ && killed != rank && late(at, kDeathNs)) {
                return says("death", rank, step,
                            "it ended too late after the process of rank " + std::to_string(killed));
            }
        }
        return {};
    }

    std::optional<Violation> may_succeed(int rank, const Step& step) const {
        if (causes_ != 1) return {};  // two ranks may differ alike
        for (size_t i = 0; i < c_.causes.size(); ++i) {
            const Cause& cause = c_.causes[i];
            const Operation& o = c_.program[size_t(step.operation)];
            bool messages =
                o.kind == Operation::kRing || o.kind == Operation::kChain || o.kind == Operation::kFromAny;
            if (cause.kind == Cause::kDiffer && run_.reached[i] && int(cause.at) == step.operation &&
                !messages) {
                return says("mismatch", rank, step, "it succeeded though a rank called another operation");
            }
        }
        return {};
    }

    std::optional<Violation> truthful(int rank, const Step& step) const {
        const Fault& f = step.fault;
        const std::vector<int>& aborts = run_.aborts[size_t(step.comm)];
        if (f.culprits.empty()) return says("culprits", rank, step, "it names nobody");
        switch (f.code) {
            case FaultCode::kTimeout:
                if (c_.limit_ms < kTellingMs) return {};
                if (causes_ == 0) return says("false fault", rank, step, "nothing went wrong");
                if (!within(f.culprits, guilty_) && !vague(f.culprits)) {
                    return says("culprits", rank, step, "it blames a rank that did all it should");
                }
                return {};
            case FaultCode::kPeerLost:
                if (within(f.culprits, killed_) || within(f.culprits, left_)) return {};
                // A receive from any rank ends when all others have left; which of them owes is not known.
                if (has(Operation::kFromAny) && meets(f.culprits, left_)) return {};
                return says("culprits", rank, step, "it names a rank that neither ended nor left");
            case FaultCode::kAborted:
                if (within(f.culprits, Ranks(aborts.begin(), aborts.end()))) return {};
                return says("culprits", rank, step, "it names a rank that did not abort");
            case FaultCode::kMismatch: {
                if (!any({Cause::kDiffer, Cause::kSkip, Cause::kSwap})) {
                    return says("false fault", rank, step, "all ranks called the same");
                }
                // Several causes can make a majority.
                if (causes_ == 1 && !meets(f.culprits, guilty_)) {
                    return says("culprits", rank, step, "it names other ranks");
                }
                return {};
            }
            case FaultCode::kDeadlock:
                if (!any({Cause::kDiffer, Cause::kSkip, Cause::kSwap, Cause::kCross})) {
                    return says("false fault", rank, step, "no ranks wait for each other");
                }
                // One that waits for any rank waits for innocent ones, too.
                if (!meets(f.culprits, guilty_) && !has(Operation::kFromAny)) {
                    return says("culprits", rank, step, "it names other ranks");
                }
                if (!std::all_of(f.culprits.begin(), f.culprits.end(), [&](int r) { return waited(r); })) {
                    return says("culprits", rank, step, "it names a rank that did not wait");
                }
                return {};
            default:
                return says("false fault", rank, step, "no such fault can happen");
        }
    }

    std::optional<Violation> stays(int rank, const Step& step) const {
        if (!step.broke || step.again_ns == 0) return {};  // 0: it was killed meanwhile
        if (step.again.code != step.fault.code || step.again.culprits != step.fault.culprits) {
            return says("stays", rank, step, "the next operation has " + described(step.again));
        }
        uint64_t took = step.again_ns - step.end_ns - run_.stopped_ns(rank, step.end_ns, step.again_ns);
        if (took > kNoticeNs) return says("stays", rank, step, "the next operation took long");
        return {};
    }

    // One cause has one fault, which all ranks name alike.
    std::optional<Violation> agreement() const {
        if (!deaths_ && !killed_.empty()) return {};
        // Both ends of a message that does not fit abort.
        if (run_.aborts[0].size() > 1) return {};
        if (causes_ != 1 || c_.comms != 1 || c_.limit_ms < kTellingMs) return {};
        const Step* first = nullptr;
        int first_rank = 0;
        for (int r = 0; r < c_.world; ++r) {
            for (const Step& step : run_.steps[size_t(r)]) {
                if (!step.broke) continue;
                if (!first) {
                    first = &step, first_rank = r;
                    continue;
                }
                // Each member of a deadlock names its own cycle.
                bool cycles = step.fault.code == FaultCode::kDeadlock;
                if (step.fault.code != first->fault.code ||
                    (!cycles && step.fault.culprits != first->fault.culprits)) {
                    return says("agreement", r, step, "but " + who(first_rank, *first));
                }
            }
        }
        return {};
    }

    // Without a cause that ends an operation, all of them succeed.
    std::optional<Violation> success() const {
        if (!c_.can_finish() || c_.limit_ms < kTellingMs) return {};
        for (int r = 0; r < c_.world; ++r) {
            if (!run_.finished[size_t(r)])
                return Violation{"success", "rank " + std::to_string(r) + " did not finish its program"};
        }
        return {};
    }

    const Case& c_;
    const Run& run_;
    bool deaths_;
    int causes_ = 0;
    Ranks guilty_, killed_, left_, kinds_;
};

}  // namespace

std::optional<Violation> violated(const Case& c, const Run& run, bool deaths) {
    return Check(c, run, deaths).first();
}

std::string story(const Case& c, const Run& run) {
    std::string text;
    auto line = [&](uint64_t ns, const std::string& what) {
        char at[40];
        std::snprintf(at, sizeof at, "%10.3f ms  ", double(ns) / 1e6 - 1000);
        text += at + what + "\n";
    };
    for (size_t i = 0; i < c.causes.size(); ++i) {
        const Cause& cause = c.causes[i];
        text += std::string(cause.of_point() ? "at its point " : "before its operation ") +
                std::to_string(cause.at) + " rank " + std::to_string(cause.rank) + ": " +
                Cause::kNames[cause.kind];
        if (cause.ms) text += " for " + std::to_string(cause.ms) + " ms";
        text += run.reached[i] ? "\n" : " (not reached)\n";
    }
    for (int r = 0; r < c.world; ++r) {
        text += "rank " + std::to_string(r) + "\n";
        for (const Step& step : run.steps[size_t(r)]) {
            const Operation& o = c.program[size_t(step.operation)];
            line(step.begin_ns, std::string(Operation::kNames[o.kind]) + " " +
                                    std::to_string(step.operation) + " (" + std::to_string(o.n) +
                                    " elements, root " + std::to_string(o.root) + ", communicator " +
                                    std::to_string(step.comm) + ")");
            if (step.end_ns) line(step.end_ns, "  " + described(step.fault));
        }
        if (run.ended_at[size_t(r)]) line(*run.ended_at[size_t(r)], "killed");
    }
    return text;
}

}  // namespace unicomm::simulation
