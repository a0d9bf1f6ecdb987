// What a SHMEM library can do, as one table of C functions: the host's shared memory has it, and so can
// NVSHMEM, rocSHMEM and others, each with its own set. Each function stands once in the list below, with the
// capability that it belongs to (X-macro: name, capability, type); what a library lacks is a null pointer.
//
// Addresses are the caller's own in the symmetric heap; `pe` says whose copy is meant. Every function returns
// a FaultCode as int, 0 being good, and then fills the Error. Streams are the library's; 0 on the CPU, where
// what returns is done. Enums are ours: SHMEM libraries number theirs differently.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace unicomm::symm {

using Domain = void*;  // one PE's end of a symmetric heap, or of a team
using Stream = void*;

struct UniqueId {
    char bytes[128];
};

struct Error {
    int32_t culprits[64];  // PEs of the domain
    int32_t n_culprits;
    char detail[512];
};

enum class SignalOp : int32_t { kSet = 0, kAdd = 1 };
enum class Compare : int32_t { kEq = 0, kNe = 1, kGt = 2, kGe = 3, kLt = 4, kLe = 5 };

enum class Capability : uint64_t {
    kHeap = 1,      // life, allocations, barrier
    kPointer = 2,   // the others' memory can be addressed
    kPutGet = 4,    // and their non-blocking forms, fence, quiet
    kSignal = 8,    // put with signal, signal, wait
    kAtomics = 16,  // 64 bits: fetch-add, compare-and-swap
    kTeams = 32,    // strided teams with barriers of their own
    kAbort = 64,    // from another thread
};

// clang-format off
#define UNICOMM_SYMM_FUNCTIONS(X)                                                                              \
    /* One PE makes an id for `world` PEs with heaps of so many bytes (0: as many as can be) each ... */       \
    X(unique_id, kHeap, int(int world, uint64_t heap_bytes, UniqueId* out, Error*))                            \
    X(discard_id, kHeap, int(const UniqueId*, Error*))  /* ... that nobody will use */                         \
    /* Collective. PE 0 is the one that made the id. Deadlines are CLOCK_MONOTONIC. */                         \
    X(init, kHeap, int(const UniqueId*, int rank, int world, const char* name, uint64_t deadline_ns,           \
                       Domain* out, Error*))                                                                   \
    X(leave, kHeap, int(Domain, Error*))  /* local: others that wait for this PE get an error */               \
    X(release, kHeap, int(Domain, Error*))  /* local: the domain is not used any more */                       \
    X(abort, kAbort, int(Domain, Error*))                                                                      \
    /* Collective, with the same arguments on all PEs, in the same order. */                                   \
    X(allocate, kHeap, int(Domain, uint64_t bytes, uint64_t align, uint64_t deadline_ns, void** out, Error*))  \
    X(free, kHeap, int(Domain, void* address, uint64_t deadline_ns, Error*))                                   \
    X(barrier, kHeap, int(Domain, uint64_t deadline_ns, Stream, Error*))                                       \
    X(ptr, kPointer, int(Domain, const void* address, uint64_t bytes, int pe, void** out, Error*))             \
    X(put, kPutGet, int(Domain, void* to, const void* from, uint64_t bytes, int pe, Stream, Error*))           \
    X(get, kPutGet, int(Domain, void* to, const void* from, uint64_t bytes, int pe, Stream, Error*))           \
    X(put_nbi, kPutGet, int(Domain, void* to, const void* from, uint64_t bytes, int pe, Stream, Error*))       \
    X(get_nbi, kPutGet, int(Domain, void* to, const void* from, uint64_t bytes, int pe, Stream, Error*))       \
    /* So much will be moved here by the non-blocking ones until `quiet`. Advice; may be lacking. */           \
    X(expect, kPutGet, int(Domain, uint64_t bytes, Error*))                                                    \
    X(fence, kPutGet, int(Domain, Stream, Error*))  /* orders puts to each PE */                               \
    X(quiet, kPutGet, int(Domain, Stream, Error*))  /* returns when they are done */                           \
    /* The signal is seen by its receiver after the data; 0 bytes: the signal alone. */                        \
    X(put_signal, kSignal, int(Domain, void* to, const void* from, uint64_t bytes, uint64_t* signal,           \
                               uint64_t value, SignalOp, int pe, Stream, Error*))                              \
    /* Until the own `signal` compares so with `value`. `source`: the only PE that can make it so, or the      \
       complement of one that should. */                                                                       \
    X(wait_signal, kSignal, int(Domain, const uint64_t* signal, Compare, uint64_t value, int source,           \
                                uint64_t deadline_ns, Stream, Error*))                                         \
    X(fetch_add, kAtomics, int(Domain, uint64_t* target, uint64_t value, int pe, uint64_t* before, Stream,     \
                               Error*))                                                                        \
    X(compare_swap, kAtomics, int(Domain, uint64_t* target, uint64_t expected, uint64_t value, int pe,         \
                                  uint64_t* before, Stream, Error*))                                           \
    /* Collective over the domain: the PEs start, start + stride, ...; null for those that are not in one. */  \
    X(team_split, kTeams, int(Domain, int start, int stride, int size, uint64_t deadline_ns, Domain* out,      \
                              Error*))
// clang-format on

struct Vtbl {
    const char* name;
    uint64_t capabilities;
#define UNICOMM_SYMM_MEMBER(name, capability, ...) std::type_identity_t<__VA_ARGS__>* name;
    UNICOMM_SYMM_FUNCTIONS(UNICOMM_SYMM_MEMBER)
#undef UNICOMM_SYMM_MEMBER
};

// Shared memory of this host: ranks as processes or threads. Has everything.
const Vtbl& host_table();

// What a table has, by its functions that are there.
inline uint64_t capabilities_of(const Vtbl& t) {
    uint64_t found = 0;
#define UNICOMM_SYMM_HAS(name, capability, ...) \
    if (t.name != nullptr) found |= uint64_t(Capability::capability);
    UNICOMM_SYMM_FUNCTIONS(UNICOMM_SYMM_HAS)
#undef UNICOMM_SYMM_HAS
    return found;
}

// A table may come from a shared object of another build: it exports this function, which returns null unless
// it was built for the same list of functions with the same types. So the list itself is the version.
#define UNICOMM_SYMM_ENTRY "unicomm_symm_table"
using TableEntry = const Vtbl*(uint32_t abi);

constexpr uint32_t table_abi() {
    uint32_t hash = 2166136261u;  // FNV-1a
    auto add = [&hash](const char* text) {
        for (; *text != 0; ++text) hash = (hash ^ uint8_t(*text)) * 16777619u;
    };
#define UNICOMM_SYMM_ABI(name, capability, ...) add(#name "=" #__VA_ARGS__ ";");
    UNICOMM_SYMM_FUNCTIONS(UNICOMM_SYMM_ABI)
#undef UNICOMM_SYMM_ABI
    for (uint64_t size : {sizeof(Vtbl), sizeof(Error), sizeof(UniqueId)}) {
        hash = (hash ^ uint32_t(size)) * 16777619u;
    }
    return hash;
}
constexpr uint32_t kTableAbi = table_abi();

}  // namespace unicomm::symm
