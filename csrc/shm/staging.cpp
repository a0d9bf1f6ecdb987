// Copies into memory that other ranks have read.
#include "shm/staging.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/clock.hpp"
#include "base/simulation.hpp"
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace unicomm::shm {
namespace {

// The last cache: how much it holds, and the share of all processors that use it.
struct LastCache {
    double bytes = 0, share = 1;
};

// The first line of a file about a cache; empty if there is none.
std::string about_last_cache(const char* what) {
    std::string path = std::string("/sys/devices/system/cpu/cpu0/cache/index3/") + what;
    char line[4096] = "";
    if (FILE* file = std::fopen(path.c_str(), "re")) {
        if (!std::fgets(line, sizeof line, file)) *line = 0;
        std::fclose(file);
    }
    return line;
}

LastCache find_last_cache() {
    double kib = std::atof(about_last_cache("size").c_str());
    int users = 0;
    for (char digit : about_last_cache("shared_cpu_map")) {  // a hexadecimal mask with commas
        const char one[] = {digit, 0};
        users += __builtin_popcountl(std::strtoul(one, nullptr, 16));
    }
    return {users ? kib * 1024 : 0, double(users) / double(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)))};
}

}  // namespace

#ifdef __SSE2__
constexpr bool kCanStream = true;

// Less than a cache line at either end is copied as usual.
void Stager::stream(char* to, const char* from, uint64_t bytes) {
    uint64_t head = -reinterpret_cast<uintptr_t>(to) & 63;
    if (head > bytes) head = bytes;
    if (head) std::memcpy(to, from, head);
    uint64_t at = head;
    for (; at + 64 <= bytes; at += 64) {
        auto* line = reinterpret_cast<__m128i*>(to + at);
        auto* source = reinterpret_cast<const __m128i*>(from + at);
        __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(line, a);
        _mm_stream_si128(line + 1, b);
        _mm_stream_si128(line + 2, c);
        _mm_stream_si128(line + 3, d);
    }
    if (at < bytes) std::memcpy(to + at, from + at, bytes - at);
    _mm_sfence();  // the release store that follows does not order streaming stores
}
#else
constexpr bool kCanStream = false;

void Stager::stream(char* to, const char* from, uint64_t bytes) { std::memcpy(to, from, bytes); }
#endif

void Stager::copy(char* to, const char* from, uint64_t bytes) {
    simulation::point("stage");
    if (bytes < kSmallCopy || !kCanStream) {
        if (bytes && to != from) std::memmove(to, from, bytes);
        return;
    }
    const uint32_t timed_every = streaming_ ? kProbe : slow_ > 0 ? 1 : kTimed;
    if (++copies_ % timed_every != 0) {
        if (streaming_) return stream(to, from, bytes);
        std::memmove(to, from, bytes);
        return;
    }
    uint64_t begin = now_ns();
    std::memmove(to, from, bytes);
    bool slow = (now_ns() - begin) * 13 > bytes * 2;  // less than 6.5 bytes per nanosecond
    slow_ = slow ? slow_ + 1 : 0;
    // One fast copy proves that copies can be fast; a slow one may only have been interrupted.
    streaming_ = streaming_ ? slow : slow_ >= kPatience;
}

ResultCopy::ResultCopy(int world, uint64_t bytes, double share) {
    if (bytes < kSmallCopy) return;  // none of its copies would bypass; most calls end here
    static const LastCache cache = find_last_cache();
    double ranks = std::max(1.0, world * cache.share);  // of one such cache
    bypass_ = kCanStream && cache.bytes > 0 && ranks * double(bytes) > share * cache.bytes;
}

void ResultCopy::copy(char* to, const char* from, uint64_t bytes) const {
    simulation::point("copy");
    bool apart = to + bytes <= from || from + bytes <= to;
    if (bypass_ && apart && bytes >= kSmallCopy) return Stager::stream(to, from, bytes);
    if (bytes && to != from) std::memmove(to, from, bytes);
}

}  // namespace unicomm::shm
