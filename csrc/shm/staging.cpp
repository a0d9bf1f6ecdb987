// Copies into memory that other ranks have read.
#include "shm/staging.hpp"

#include <cstring>

#include "base/clock.hpp"
#include "base/simulation.hpp"
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace unicomm::shm {
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
    if (bytes < kSmall || !kCanStream) {
        if (bytes && to != from) std::memmove(to, from, bytes);
        return;
    }
    if (streaming_ && ++streamed_ % kProbe != 0) return stream(to, from, bytes);
    uint64_t begin = now_ns();
    std::memmove(to, from, bytes);
    bool slow = (now_ns() - begin) * 4 > bytes;  // less than 4 bytes per nanosecond
    slow_ = slow ? slow_ + 1 : 0;
    // One fast copy proves that copies can be fast; a slow one may only have been interrupted.
    streaming_ = streaming_ ? slow : slow_ >= kPatience;
}

}  // namespace unicomm::shm
