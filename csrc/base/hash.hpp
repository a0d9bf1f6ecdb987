// A step of a 64-bit hash, for the signatures of operations.
#pragma once
#include <cstdint>

namespace unicomm {

inline uint64_t mix(uint64_t hash, uint64_t value) {  // the finalizer of splitmix64
    hash += value + 0x9e3779b97f4a7c15ull;
    hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9ull;
    hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebull;
    return hash ^ (hash >> 31);
}

}  // namespace unicomm
