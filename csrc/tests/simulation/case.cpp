// Random cases, and their text.
#include "tests/simulation/case.hpp"

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace unicomm::simulation {
namespace {

using testing::Operation;

// Around the borders of the core: what an announcement holds (16), a slot (1024), a message that is offered
// (more than 1024), an all-reduce in two shots, and, seldom, tensors that are read in place (16384).
const std::vector<size_t> kSizes{0, 1, 3, 16, 17, 40, 300, 1024, 1030, 2500};
const std::vector<size_t> kLarge{16384, 17000};

template <class T>
T one_of(std::mt19937& rng, std::initializer_list<T> of) {
    return of.begin()[rng() % of.size()];
}

Cause random_cause(std::mt19937& rng, const Case& c) {
    Cause cause{};
    cause.kind = int(rng() % Cause::kKinds);
    cause.rank = int(rng() % unsigned(c.world));
    if (cause.of_point()) {
        // Most fibers reach some hundred points; early ones matter as much as late ones.
        cause.at = 1 + rng() % (uint64_t{1} << (2 + rng() % 11));
    } else {
        cause.at = rng() % c.program.size();
    }
    if (cause.kind == Cause::kDelay || cause.kind == Cause::kStop) {
        // The longest one is longer than a rank that knows a deadlock waits for the others to know it.
        cause.ms = one_of<uint64_t>(rng, {1, 30, 150, 400, 700, 3000, 9000, 14000});
    }
    if (cause.kind == Cause::kSwap) cause.at = rng() % std::max<uint64_t>(c.program.size() - 1, 1);
    return cause;
}

}  // namespace

bool Case::can_finish() const {
    uint64_t most = 0;
    for (const Cause& cause : causes) {
        if (cause.kind != Cause::kDelay && cause.kind != Cause::kStop) return false;
        most += cause.ms;
    }
    return most + 500 < limit_ms;
}

Case random_case(uint64_t seed) {
    std::seed_seq sequence{uint32_t(seed), uint32_t(seed >> 32)};
    std::mt19937 rng(sequence);
    Case c;
    c.world = 2 + int(rng() % 5);
    c.comms = rng() % 4 == 0 ? 2 : 1;
    c.limit_ms = one_of<uint64_t>(rng, {60, 300, 1000, 2000, 5000, 5000, 20000});
    size_t operations = 1 + rng() % 8;
    bool large = rng() % 32 == 0;
    for (size_t i = 0; i < operations; ++i) {
        c.program.push_back(testing::random_operation(rng, c.world, large && rng() % 2 ? kLarge : kSizes));
    }
    unsigned causes = one_of(rng, {0u, 0u, 1u, 1u, 1u, 2u});
    for (unsigned i = 0; i < causes; ++i) c.causes.push_back(random_cause(rng, c));
    // A message that no rank takes would be taken by a later operation.
    for (Cause& cause : c.causes) {
        if (cause.kind != Cause::kSkip && cause.kind != Cause::kSwap) continue;
        for (uint64_t at = cause.at; at < std::min<uint64_t>(cause.at + 2, operations); ++at) {
            int kind = c.program[at].kind;
            if (kind == Operation::kRing || kind == Operation::kChain) cause.kind = Cause::kGone;
        }
    }
    // The values tell operations apart, unless a rank leaves one out: two operations may then fit.
    bool shifted = std::any_of(c.causes.begin(), c.causes.end(), [](const Cause& cause) {
        return cause.kind == Cause::kSkip || cause.kind == Cause::kSwap || cause.kind == Cause::kDiffer;
    });
    for (size_t i = 0; i < operations; ++i) {
        Operation& o = c.program[i];
        if (!shifted) o.salt = int(i) * 7;
        // Nor is there a mismatch on purpose beside one that is not.
        if (shifted && o.kind == Operation::kMismatch) o.kind = Operation::kBarrier;
    }
    Settings& s = c.settings;
    s.seed = uint64_t(rng()) << 32 | rng();
    s.gap = one_of(rng, {0.0, 2.0, 8.0, 30.0, 120.0, 500.0});
    s.turns = rng() % 2;
    s.yield_ns = one_of<uint64_t>(rng, {20000, 60000, 250000, 800000});
    s.cores = rng() % 4 ? 1 : 64;
    return c;
}

std::string text_of(const Case& c) {
    std::ostringstream out;
    out << "world=" << c.world << " comms=" << c.comms << " limit_ms=" << c.limit_ms
        << " seed=" << c.settings.seed << " gap=" << c.settings.gap << " turns=" << c.settings.turns
        << " yield_ns=" << c.settings.yield_ns << " cores=" << c.settings.cores;
    if (c.settings.frozen) out << " frozen=1";
    for (const Operation& o : c.program) {
        out << " op=" << Operation::kNames[o.kind] << ',' << o.n << ',' << o.root << ',' << o.tag_a << ','
            << o.tag_b << ',' << o.one_by_one << ',' << o.equal_parts << ',' << o.places << ',' << o.salt;
    }
    for (const Cause& cause : c.causes) {
        out << " cause=" << Cause::kNames[cause.kind] << ',' << cause.rank << ',' << cause.at << ','
            << cause.ms;
    }
    for (const Switch& s : c.settings.switches) out << " switch=" << s.fiber << ',' << s.point << ',' << s.to;
    return out.str();
}

namespace {

template <size_t count>
int named(const char* const (&names)[count], const std::string& name) {
    for (size_t i = 0; i < count; ++i) {
        if (name == names[i]) return int(i);
    }
    throw std::runtime_error("a case names the unknown '" + name + "'");
}

}  // namespace

Case read_case(const std::string& text) {
    Case c;
    std::istringstream words(text);
    for (std::string word; words >> word;) {
        size_t equal = word.find('=');
        if (equal == std::string::npos) throw std::runtime_error("a case has no word '" + word + "'");
        std::string key = word.substr(0, equal), value = word.substr(equal + 1);
        std::replace(value.begin(), value.end(), ',', ' ');
        std::istringstream in(value);
        std::string name;
        Settings& s = c.settings;
        if (key == "world") {
            in >> c.world;
        } else if (key == "comms") {
            in >> c.comms;
        } else if (key == "limit_ms") {
            in >> c.limit_ms;
        } else if (key == "seed") {
            in >> s.seed;
        } else if (key == "gap") {
            in >> s.gap;
        } else if (key == "turns") {
            in >> s.turns;
        } else if (key == "yield_ns") {
            in >> s.yield_ns;
        } else if (key == "cores") {
            in >> s.cores;
        } else if (key == "frozen") {
            in >> s.frozen;
        } else if (key == "op") {
            Operation o;
            in >> name >> o.n >> o.root >> o.tag_a >> o.tag_b >> o.one_by_one >> o.equal_parts >> o.places >>
                o.salt;
            o.kind = named(Operation::kNames, name);
            c.program.push_back(o);
        } else if (key == "cause") {
            Cause cause{};
            in >> name >> cause.rank >> cause.at >> cause.ms;
            cause.kind = named(Cause::kNames, name);
            c.causes.push_back(cause);
        } else if (key == "switch") {
            Switch to{};
            in >> to.fiber >> to.point >> to.to;
            s.switches.push_back(to);
        } else {
            throw std::runtime_error("a case has no word '" + key + "'");
        }
        if (!in) throw std::runtime_error("a case has a damaged word '" + word + "'");
    }
    if (c.world < 2 || c.world > kProcesses || c.comms < 1 || c.comms > 2) {
        throw std::runtime_error("a case has 2 to 8 ranks and 1 or 2 communicators");
    }
    return c;
}

}  // namespace unicomm::simulation
