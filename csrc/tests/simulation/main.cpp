// Simulates the core: random programs, schedules and faults from seeds. docs/design/simulation.md.
//
//   native_simulate --seeds N [--first S]   runs N seeds; shrinks and prints what fails
//   native_simulate --seed S | --case TEXT  runs one; --trace prints its schedule, --points each point
//   native_simulate --regressions FILE      runs the cases and seeds of a file, one a line, # begins a reason
//
// With --deaths, a rank must notice within a second that any process has ended. Exit code 1: something
// failed.
#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>

#include "tests/simulation/isolated.hpp"
#include "tests/simulation/properties.hpp"
#include "tests/simulation/shrink.hpp"

using namespace unicomm::simulation;

namespace {

constexpr uint64_t kBatch = 500;  // seeds of one process
constexpr int kShrunk = 2;        // failures of each property that are shrunk
constexpr unsigned kSilentSeconds = 60;

struct Options {
    bool deaths = false, trace = false, points = false, frozen = false;
};

Case case_of(uint64_t seed, const Options& options) {
    Case c = random_case(seed);
    c.settings.frozen = options.frozen;
    return c;
}

void print(const Case& c, const Run& run) {
    std::fputs(story(c, run).c_str(), stdout);
    std::printf("case: %s\n", text_of(c).c_str());
}

// Returns whether all properties hold.
bool show(const Case& c, const Options& options) {
    Scheduler::Told told = [](const std::string& line) { std::puts(line.c_str()); };
    Run run = run_case(c, options.trace || options.points ? told : nullptr, options.points);
    print(c, run);
    auto v = violated(c, run, options.deaths);
    if (v) std::printf("FAILED %s: %s\n", v->property.c_str(), v->text.c_str());
    return !v;
}

struct Totals {
    uint64_t seeds = 0, points = 0, ms = 0, failed = 0;
    std::map<std::string, int> properties;
};

void failed(uint64_t seed, const std::string& property, const std::string& text, const Options& options,
            Totals& totals) {
    ++totals.failed;
    std::printf("FAILED seed %lu, %s: %s\n", static_cast<unsigned long>(seed), property.c_str(),
                text.c_str());
    if (totals.properties[property]++ >= kShrunk) return;
    Case c = shrunk(case_of(seed, options), property, options.deaths);
    Answer answer = isolated(
        [&](const auto& say) {
            Run run = run_case(c);
            auto v = violated(c, run, options.deaths);
            say("shrunk to: " + (v ? v->text : "?") + "\n" + story(c, run));
        },
        kSilentSeconds);
    std::printf("%scase: %s\n", answer.text.c_str(), text_of(c).c_str());
    std::fflush(stdout);
}

// Runs seeds in processes of their own, a batch each. A process says which seed it begins, and what failed.
void run_seeds(uint64_t first, uint64_t count, const Options& options, Totals& totals) {
    for (uint64_t at = first; at < first + count;) {
        uint64_t end = std::min(at + kBatch, first + count), begun = at;
        Answer answer = isolated(
            [&](const auto& say) {
                uint64_t points = 0, ns = 0;
                for (uint64_t seed = at; seed < end; ++seed) {
                    say("begin " + std::to_string(seed) + "\n");
                    Case c = case_of(seed, options);
                    Run run = run_case(c);
                    points += run.points, ns += run.ns;
                    if (auto v = violated(c, run, options.deaths)) {
                        say("failed " + std::to_string(seed) + "\t" + v->property + "\t" + v->text + "\n");
                    }
                }
                say("total " + std::to_string(points) + " " + std::to_string(ns / kMs) + "\n");
            },
            kSilentSeconds);
        std::istringstream lines(answer.text);
        for (std::string line; std::getline(lines, line);) {
            std::istringstream words(line);
            std::string what;
            words >> what;
            if (what == "begin") {
                words >> begun;
            } else if (what == "failed") {
                uint64_t seed = 0;
                std::string property, text;
                words >> seed;
                words.ignore(1);
                std::getline(words, property, '\t');
                std::getline(words, text);
                failed(seed, property, text, options, totals);
            } else {
                uint64_t points = 0, ms = 0;
                words >> points >> ms;
                totals.points += points, totals.ms += ms;
            }
        }
        if (!answer.whole) failed(begun, "crash", answer.ended, options, totals);
        uint64_t next = answer.whole ? end : begun + 1;
        totals.seeds += next - at;
        at = next;
    }
}

bool run_regressions(const char* path, const Options& options) {
    std::ifstream file(path);
    if (!file) {
        std::fprintf(stderr, "cannot read %s\n", path);
        return false;
    }
    int runs = 0, wrong = 0;
    for (std::string line; std::getline(file, line);) {
        line = line.substr(0, line.find('#'));
        if (line.find_first_not_of(' ') == std::string::npos) continue;
        bool seed = line.rfind("seed ", 0) == 0;
        Case c = seed ? random_case(std::strtoull(line.c_str() + 5, nullptr, 10)) : read_case(line);
        std::string said = verdict(c, options.deaths);
        ++runs;
        if (said.empty()) continue;
        ++wrong;
        std::printf("FAILED %s\n  %s\n", said.c_str(), line.c_str());
    }
    std::printf("regressions: %d cases, %d failed\n", runs, wrong);
    return runs > 0 && wrong == 0;
}

}  // namespace

int main(int argc, char** argv) {
    Options options;
    const char *seeds = nullptr, *seed = nullptr, *text = nullptr, *regressions = nullptr, *first = "1";
    for (int i = 1; i < argc; ++i) {
        std::string word = argv[i];
        const char** value = word == "--seeds"         ? &seeds
                             : word == "--seed"        ? &seed
                             : word == "--case"        ? &text
                             : word == "--regressions" ? &regressions
                             : word == "--first"       ? &first
                                                       : nullptr;
        if (value && i + 1 < argc) {
            *value = argv[++i];
        } else if (word == "--deaths") {
            options.deaths = true;
        } else if (word == "--frozen") {
            options.frozen = true;
        } else if (word == "--trace") {
            options.trace = true;
        } else if (word == "--points") {
            options.points = true;
        } else {
            std::fprintf(stderr, "unknown option, or an option without its value: %s\n", word.c_str());
            return 2;
        }
    }
    try {
        bool good = true;
        if (regressions) good &= run_regressions(regressions, options);
        if (seed) good &= show(case_of(std::strtoull(seed, nullptr, 10), options), options);
        if (text) good &= show(read_case(text), options);
        if (seeds) {
            auto began = std::chrono::steady_clock::now();
            Totals totals;
            run_seeds(std::strtoull(first, nullptr, 10), std::strtoull(seeds, nullptr, 10), options, totals);
            std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
            std::printf(
                "simulated %lu programs in %.1f s (%.0f a minute), %.2f million points, %.1f hours of "
                "virtual time; %lu failed\n",
                static_cast<unsigned long>(totals.seeds), took.count(),
                double(totals.seeds) / took.count() * 60, double(totals.points) / 1e6,
                double(totals.ms) / 3.6e6, static_cast<unsigned long>(totals.failed));
            for (const auto& [property, count] : totals.properties) {
                std::printf("  %s: %d\n", property.c_str(), count);
            }
            good &= totals.failed == 0;
        }
        return good ? 0 : 1;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 2;
    }
}
