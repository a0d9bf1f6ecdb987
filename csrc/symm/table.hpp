// The interface to a SHMEM library: one table of C functions. Shared memory of the host, NVSHMEM, rocSHMEM
// and others implement it, each with its own set of functions. Each function is declared once in the list
// below, with the capability that it belongs to (X-macro: name, capability, type); a missing function is a
// null pointer.
//
// Addresses are those of the caller's own symmetric heap; `pe` selects the PE whose copy is meant. Every
// function returns a FaultCode as int, 0 for success, and otherwise fills the Error. Streams are those of the
// library. On the CPU they are 0, and a function has completed when it returns. The enums are ours: SHMEM
// libraries number theirs differently.
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
    kPointer = 2,   // the memory of other PEs can be addressed
    kPutGet = 4,    // and their non-blocking forms, fence, quiet
    kSignal = 8,    // put with signal, signal, wait
    kAtomics = 16,  // 64 bits: fetch-add, compare-and-swap
    kTeams = 32,    // strided teams with barriers of their own
    kAbort = 64,    // from another thread
};

// clang-format off
#define UNICOMM_SYMM_FUNCTIONS(X)                                                                              \
    /* One PE creates an id for `world` PEs, each with a heap of that size (0: as large as possible) ... */      \
    X(unique_id, kHeap, int(int world, uint64_t heap_bytes, UniqueId* out, Error*))                            \
    X(discard_id, kHeap, int(const UniqueId*, Error*))  /* ... that will not be used */                         \
    /* Collective. PE 0 has created the id. Deadlines are CLOCK_MONOTONIC. */                                   \
    X(init, kHeap, int(const UniqueId*, int rank, int world, const char* name, uint64_t deadline_ns,           \
                       Domain* out, Error*))                                                                   \
    X(leave, kHeap, int(Domain, Error*))  /* local: PEs that wait for this one get an error */                \
    X(release, kHeap, int(Domain, Error*))  /* local: the domain is no longer used */                           \
    /* The other PEs are told of the fault `code`, with the culprits of `why`; 0: of an abort. */               \
    X(abort, kAbort, int(Domain, int code, const Error* why, Error*))                                          \
    /* Collective, with the same arguments on all PEs, in the same order. */                                   \
    X(allocate, kHeap, int(Domain, uint64_t bytes, uint64_t align, uint64_t deadline_ns, void** out, Error*))  \
    X(free, kHeap, int(Domain, void* address, uint64_t deadline_ns, Error*))                                   \
    X(barrier, kHeap, int(Domain, uint64_t deadline_ns, Stream, Error*))                                       \
    X(ptr, kPointer, int(Domain, const void* address, uint64_t bytes, int pe, void** out, Error*))             \
    X(put, kPutGet, int(Domain, void* to, const void* from, uint64_t bytes, int pe, Stream, Error*))           \
    X(get, kPutGet, int(Domain, void* to, const void* from, uint64_t bytes, int pe, Stream, Error*))           \
    X(put_nbi, kPutGet, int(Domain, void* to, const void* from, uint64_t bytes, int pe, Stream, Error*))       \
    X(get_nbi, kPutGet, int(Domain, void* to, const void* from, uint64_t bytes, int pe, Stream, Error*))       \
    /* A hint: the bytes that non-blocking functions will move here until `quiet`. May be missing. */          \
    X(expect, kPutGet, int(Domain, uint64_t bytes, Error*))                                                    \
    X(fence, kPutGet, int(Domain, Stream, Error*))  /* orders puts to each PE */                               \
    X(quiet, kPutGet, int(Domain, Stream, Error*))  /* returns when all have completed */                      \
    /* The receiver sees the signal after the data. 0 bytes: only the signal. */                               \
    X(put_signal, kSignal, int(Domain, void* to, const void* from, uint64_t bytes, uint64_t* signal,           \
                               uint64_t value, SignalOp, int pe, Stream, Error*))                              \
    /* Waits until the own `signal` compares so with `value`. `source`: the only PE that can cause that, or    \
       the complement of a PE that is expected to. */                                                          \
    X(wait_signal, kSignal, int(Domain, const uint64_t* signal, Compare, uint64_t value, int source,           \
                                uint64_t deadline_ns, Stream, Error*))                                         \
    X(fetch_add, kAtomics, int(Domain, uint64_t* target, uint64_t value, int pe, uint64_t* before, Stream,     \
                               Error*))                                                                        \
    X(compare_swap, kAtomics, int(Domain, uint64_t* target, uint64_t expected, uint64_t value, int pe,         \
                                  uint64_t* before, Stream, Error*))                                           \
    /* Collective over the domain: a team of PEs start, start + stride, ...; null for PEs in no team. */       \
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

// Returns the capabilities of a table, from the functions that it has.
inline uint64_t capabilities_of(const Vtbl& t) {
    uint64_t found = 0;
#define UNICOMM_SYMM_HAS(name, capability, ...) \
    if (t.name != nullptr) found |= uint64_t(Capability::capability);
    UNICOMM_SYMM_FUNCTIONS(UNICOMM_SYMM_HAS)
#undef UNICOMM_SYMM_HAS
    return found;
}

// A shared object of another build may export a table through this function. It returns null unless it was
// built for the same list of functions with the same types: the list itself is the version.
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
