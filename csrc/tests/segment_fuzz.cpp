// Another process writes into a segment and a wait table while ranks work. Each operation must end by its
// deadline, with a fault or with the right data, and must touch no memory but its own. Only control words are
// damaged: nothing could detect damage of the data that ranks send.
#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <cstddef>

#include "shm/waiting/wait_table.hpp"
#include "tests/random_operations.hpp"

using namespace unicomm;
using namespace unicomm::testing;
using namespace unicomm::shm;

namespace {

constexpr uint64_t kSecond = 1000000000;

struct Range {
    char* at;
    size_t bytes;
};

template <class T>
Range range(T& what, size_t bytes = sizeof(T)) {
    return {reinterpret_cast<char*>(&what), bytes};
}

std::vector<Range> control_words(Segment& s) {
    std::vector<Range> out{range(s.header())};
    int world = s.layout().world;
    for (int r = 0; r < world; ++r) {
        out.push_back(range(s.control(r)));
        for (int k = 0; k < 2; ++k) {
            Announcement& a = s.announcement(r, uint64_t(k));
            out.push_back(range(a, offsetof(Announcement, inline_data)));
        }
        for (int to = 0; to < world; ++to) {
            if (to == r) continue;
            out.push_back(range(s.channel(r, to)));
            for (uint64_t n = 0; n < s.layout().p2p_depth; ++n) {
                out.push_back({s.chunk(r, to, n), sizeof(ChunkHeader)});
            }
        }
    }
    return out;
}

// Forks a process that damages the ranges of the shared mapping.
pid_t damage(const std::vector<Range>& ranges, unsigned seed) {
    pid_t child = fork();
    expect(child >= 0, "fork");
    if (child > 0) return child;
    std::mt19937 rng(seed);
    for (;;) {
        timespec pause{0, long(rng() % 2000000)};
        nanosleep(&pause, nullptr);
        const Range& range = ranges[rng() % ranges.size()];
        auto* byte = reinterpret_cast<std::atomic<uint8_t>*>(range.at + rng() % range.bytes);
        // Flips one bit, or writes some random bytes.
        if (rng() % 2) {
            byte->fetch_xor(uint8_t(1u << rng() % 8));
        } else {
            for (int i = 0; i < 8 && reinterpret_cast<char*>(byte + i) < range.at + range.bytes; ++i) {
                byte[i].store(uint8_t(rng()));
            }
        }
    }
}

void end(pid_t child) {
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    expect(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "the one that damages lives until the end");
}

struct Tally {
    std::atomic<int> right{0}, faults{0};
};

void segment(unsigned seed, Tally& tally) {
    int world = 2 + int(seed % 3);
    auto segment = std::make_shared<Segment>(world, 16 * 1024, 16 * 1024);
    std::vector<int> pids(static_cast<size_t>(world), static_cast<int>(getpid()));
    std::vector<std::unique_ptr<Group>> groups;
    for (int r = 0; r < world; ++r) {
        groups.push_back(std::make_unique<Group>(segment, r, pids, "fuzz"));
        offer_memory(*groups.back());
    }
    pid_t child = damage(control_words(*segment), seed);
    std::vector<std::thread> threads;
    for (auto& g : groups) {
        threads.emplace_back([&] {
            std::mt19937 rng(seed);
            for (int i = 0; i < 200; ++i) {
                uint64_t began = now_ns();
                Fault fault = one_operation(*g, rng);
                // A busy machine may be slow, but not this slow.
                expect(now_ns() - began < 40 * kSecond, "the deadline is kept");
                if (fault) {
                    ++tally.faults;
                    g->abort();
                    return;
                }
                ++tally.right;
            }
        });
    }
    for (auto& t : threads) t.join();
    end(child);
}

void wait_table(unsigned seed, Tally& tally) {
    std::vector<int> pids(2, int(getpid()));
    std::unique_ptr<Group> groups[2][2];
    for (auto& pair : groups) {
        auto segment = std::make_shared<Segment>(2, 4096, 4096);
        for (int r = 0; r < 2; ++r) pair[r] = std::make_unique<Group>(segment, r, pids, "fuzz");
    }
    std::vector<Range> ranges{{reinterpret_cast<char*>(&WaitTable::mine()->page()), sizeof(WaitTablePage)}};
    WaitSlot* waits = WaitTable::mine()->page().waits;
    for (int i = 0; i < kWaits; ++i) {  // most of it is room for awaited ranks
        for (int k = 0; k < 8; ++k) ranges.push_back(range(waits[i], 64));
        ranges.push_back({reinterpret_cast<char*>(&waits[i].looks), 32});
    }
    pid_t child = damage(ranges, seed);
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r) {
        threads.emplace_back([&, r] {
            uint64_t began = now_ns();
            Fault fault = groups[r][r]->barrier(op_of(OpCode::kBarrier, 0));
            expect(bool(fault), "a circle cannot end well");
            expect(now_ns() - began < 40 * kSecond, "the deadline is kept");
            ++tally.faults;
            groups[r][r]->abort(), groups[1 - r][r]->abort();
        });
    }
    for (auto& t : threads) t.join();
    end(child);
}

}  // namespace

int main(int argc, char** argv) {
    unsigned rounds = argc > 1 ? unsigned(std::atoi(argv[1])) : 30;
    unsigned first = argc > 2 ? unsigned(std::atoi(argv[2])) : 1;
    limit_ns = kSecond;
    set_thread_check([](uint64_t, int, const std::vector<uint64_t>& waiting, std::vector<uint64_t>& matter) {
        matter = waiting;
        return true;
    });
    Tally tally;
    for (unsigned seed = first; seed < first + rounds; ++seed) {
        segment(seed, tally);
        if (seed % 5 == 0) wait_table(seed, tally);
    }
    expect(tally.right > 0 && tally.faults > 0, "both happened");
    std::printf("damaged memory: %d operations right, %d faults\n", tally.right.load(), tally.faults.load());
    return 0;
}
