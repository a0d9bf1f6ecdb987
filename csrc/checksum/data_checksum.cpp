// Pieces of memory into lanes, by the kernel of this machine, and lanes into one number.
#include "checksum/data_checksum.hpp"

#include <bit>
#include <cstring>

#include "checksum/lanes.hpp"
#include "reduce/fold.hpp"

namespace unicomm {
namespace {

constexpr uint64_t kJoin = 0x9E3779B185EBCA87;  // odd: a prime of xxHash

uint64_t join(uint64_t h, uint64_t x) { return std::rotl(h ^ x, 27) * kJoin; }

AdvanceLanes kernel() {
#ifdef UNICOMM_X86
    const char* isa = fold_isa();
    if (std::strcmp(isa, "avx512") == 0) return avx512::advance_lanes;
    if (std::strcmp(isa, "avx2") == 0) return avx2::advance_lanes;
#endif
    return baseline::advance_lanes;
}

}  // namespace

void DataChecksum::add(const void* memory, int64_t bytes) {
    alignas(64) uint64_t lanes[kChecksumLanes];
    for (int k = 0; k < kChecksumLanes; ++k) lanes[k] = uint64_t(k) + 1;
    const char* data = static_cast<const char*>(memory);
    const AdvanceLanes advance = kernel();
    const int64_t stripes = bytes / kStripe, rest = bytes % kStripe;
    if (stripes) advance(lanes, data, stripes);
    if (rest) {
        alignas(64) char last[kStripe] = {};
        std::memcpy(last, data + stripes * kStripe, static_cast<size_t>(rest));
        advance(lanes, last, 1);
    }
    uint64_t h = static_cast<uint64_t>(bytes) * kJoin;
    for (uint64_t lane : lanes) h = join(h, lane);
    sum_ = join(sum_, h);
}

uint64_t DataChecksum::value() const {
    uint64_t h = sum_;  // the finalizer of MurmurHash3 (public domain, Austin Appleby)
    h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCD;
    h = (h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53;
    return h ^ (h >> 33);
}

}  // namespace unicomm
