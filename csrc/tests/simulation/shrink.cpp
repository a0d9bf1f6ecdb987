// Delta debugging of cases.
#include "tests/simulation/shrink.hpp"

#include <algorithm>

#include "tests/simulation/isolated.hpp"
#include "tests/simulation/properties.hpp"

namespace unicomm::simulation {
namespace {

constexpr int kMostTries = 4000;

class Shrinker {
  public:
    Shrinker(Case c, std::string property, bool deaths)
        : best_(std::move(c)), property_(std::move(property)), deaths_(deaths) {}

    Case run() {
        make_explicit();
        for (bool changed = true; changed && tries_ < kMostTries;) {
            changed = fewer_causes();
            changed |= fewer_operations();
            changed |= fewer_ranks();
            changed |= fewer_switches();
            changed |= simpler();
        }
        return best_;
    }

  private:
    bool keep(const Case& candidate) {
        if (++tries_ > kMostTries) return false;
        std::string said = verdict(candidate, deaths_);
        if (said.substr(0, said.find('\t')) != property_) return false;
        best_ = candidate;
        return true;
    }

    // Replaces the random switches by the list of those that were taken.
    void make_explicit() {
        Answer answer = isolated(
            [&](const auto& say) {
                Case listed = best_;
                listed.settings.switches = run_case(best_).taken;
                listed.settings.gap = 0;
                listed.settings.turns = false;
                say(text_of(listed));
            },
            30);
        if (answer.whole) keep(read_case(answer.text));
    }

    bool fewer_causes() {
        bool changed = false;
        for (size_t i = 0; i < best_.causes.size();) {
            Case c = best_;
            c.causes.erase(c.causes.begin() + long(i));
            if (keep(c)) {
                changed = true;
            } else {
                ++i;
            }
        }
        return changed;
    }

    bool fewer_operations() {
        bool changed = false;
        for (size_t i = best_.program.size(); i-- > 0;) {
            if (best_.program.size() == 1) break;
            Case c = best_;
            c.program.erase(c.program.begin() + long(i));
            for (Cause& cause : c.causes) {
                if (!cause.of_point() && cause.at > i) --cause.at;
            }
            changed |= keep(c);
        }
        return changed;
    }

    bool fewer_ranks() {
        bool changed = false;
        for (int gone = best_.world - 1; gone >= 0 && best_.world > 2; --gone) {
            Case c = best_;
            --c.world;
            auto renumbered = [&](int rank) { return rank > gone ? rank - 1 : rank; };
            std::erase_if(c.causes, [&](const Cause& cause) { return cause.rank == gone; });
            for (Cause& cause : c.causes) cause.rank = renumbered(cause.rank);
            for (auto& o : c.program) o.root = renumbered(o.root) % c.world;
            auto& switches = c.settings.switches;
            std::erase_if(switches, [&](const Switch& s) {
                return s.fiber % kProcesses == gone || s.to % kProcesses == gone;
            });
            for (Switch& s : switches) {
                s.fiber = s.fiber / kProcesses * kProcesses + renumbered(s.fiber % kProcesses);
                s.to = s.to / kProcesses * kProcesses + renumbered(s.to % kProcesses);
            }
            changed |= keep(c);
        }
        return changed;
    }

    bool fewer_switches() {
        bool changed = false;
        for (size_t part = std::max<size_t>(best_.settings.switches.size() / 2, 1);; part /= 2) {
            for (size_t at = 0; at < best_.settings.switches.size();) {
                Case c = best_;
                auto& all = c.settings.switches;
                size_t end = std::min(at + part, all.size());
                all.erase(all.begin() + long(at), all.begin() + long(end));
                if (keep(c)) {
                    changed = true;
                } else {
                    at = end;
                }
                if (tries_ > kMostTries) return changed;
            }
            if (part <= 1) return changed;
        }
    }

    template <class Change>
    bool tries(Change change) {
        Case c = best_;
        change(c);
        return text_of(c) != text_of(best_) && keep(c);
    }

    bool simpler() {
        bool changed = tries([](Case& c) { c.comms = 1; });
        changed |= tries([](Case& c) { c.settings.cores = 1; });
        for (size_t i = 0; i < best_.program.size(); ++i) {
            for (size_t n : {1, 17, 1030}) {
                if (n < best_.program[i].n) changed |= tries([&](Case& c) { c.program[i].n = n; });
            }
            changed |= tries([&](Case& c) { c.program[i].kind = testing::Operation::kBarrier; });
            changed |= tries([&](Case& c) {
                auto& o = c.program[i];
                o.places = o.tag_a = o.tag_b = 0, o.one_by_one = o.equal_parts = false;
            });
        }
        for (size_t i = 0; i < best_.causes.size(); ++i) {
            if (!best_.causes[i].of_point()) continue;
            changed |= tries([&](Case& c) { c.causes[i].at = 1; });
            changed |= tries([&](Case& c) { c.causes[i].at = std::max<uint64_t>(c.causes[i].at / 2, 1); });
        }
        return changed;
    }

    Case best_;
    std::string property_;
    bool deaths_;
    int tries_ = 0;
};

}  // namespace

std::string verdict(const Case& c, bool deaths) {
    Answer answer = isolated(
        [&](const auto& say) {
            if (auto v = violated(c, run_case(c), deaths)) say(v->property + "\t" + v->text);
        },
        30);
    return answer.whole ? answer.text : "crash\t" + answer.ended;
}

Case shrunk(Case c, const std::string& property, bool deaths) {
    return Shrinker(std::move(c), property, deaths).run();
}

}  // namespace unicomm::simulation
