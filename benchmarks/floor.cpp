// What the machine allows between two of its cores: a flag from one to the other and back, a copy on both at once, and
// a buffer handed over (one core writes it, the other reads it), with ordinary and with streaming stores. JSON.
#include <emmintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

using Clock = std::chrono::steady_clock;
struct alignas(128) Flag {
    std::atomic<uint64_t> value{0};
};
Flag flags[2];

void pin(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    sched_setaffinity(0, sizeof set, &set);
}

void meet(int me, uint64_t round) {
    flags[me].value.store(round, std::memory_order_release);
    while (flags[1 - me].value.load(std::memory_order_acquire) < round) _mm_pause();
}

// Median microseconds of `body(me, round)` on both cores, of the slower one.
double both(const std::function<void(int, uint64_t)>& body, int rounds) {
    std::vector<double> times[2];
    for (auto& f : flags) f.value = 0;
    auto run = [&](int me) {
        pin(me);
        for (int i = 1; i <= rounds; ++i) {
            auto begin = Clock::now();
            body(me, static_cast<uint64_t>(i));
            times[me].push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
        }
    };
    std::thread other(run, 1);
    run(0);
    other.join();
    double worst = 0;
    for (auto& t : times) {
        std::nth_element(t.begin(), t.begin() + rounds / 2, t.end());
        worst = std::max(worst, t[static_cast<size_t>(rounds / 2)]);
    }
    return worst;
}

void stream(char* to, const char* from, size_t n) {
    for (size_t i = 0; i < n; i += 16) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    }
    _mm_sfence();
}

int main() {
    std::printf("{\"flag\": %.4f", both(meet, 20000));
    for (size_t n : {size_t(1) << 10, size_t(1) << 16, size_t(1) << 20, size_t(1) << 24}) {
        int rounds = static_cast<int>(std::clamp<size_t>((size_t(1) << 28) / n, 20, 4000));
        std::vector<char> from[2], to[2];
        for (int me : {0, 1}) from[me].assign(n, 1), to[me].assign(n, 2);
        char* shared = static_cast<char*>(std::aligned_alloc(4096, 4 * n + 4096));
        std::memset(shared, 3, 4 * n);
        double copy = both([&](int me, uint64_t) { std::memcpy(to[me].data(), from[me].data(), n); }, rounds);
        auto exchange = [&](bool streaming) {
            return both(
                [&](int me, uint64_t i) {
                    char* mine = shared + (2 * size_t(me) + (i & 1)) * n;
                    if (streaming) {
                        stream(mine, from[me].data(), n);
                    } else {
                        std::memcpy(mine, from[me].data(), n);
                    }
                    meet(me, i);
                    std::memcpy(to[me].data(), shared + (2 * size_t(1 - me) + (i & 1)) * n, n);
                },
                rounds);
        };
        std::printf(", \"%zu\": {\"copy\": %.3f, \"exchange\": %.3f, \"streamed\": %.3f}", n, copy,
                    exchange(false), exchange(true));
        std::free(shared);
    }
    std::printf("}\n");
}
