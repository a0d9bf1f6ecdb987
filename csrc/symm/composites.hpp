// What is made of a table's functions: broadcast, all-to-all, reductions, and the exchange of a mixture of
// experts. Written once, for every library that has puts and gets; where its memory can be addressed
// nothing is copied twice.
//
// All read: each PE waits until all are there, looks at what the others have for it, and copies it. So a PE
// writes to its own memory only (but for the second half of two_shot), and one that gives up spoils nobody's.
//
// An operation begins with a meeting: each PE says in its own symmetric memory what it calls, all compare
// all. There are two such places, used in turn: who is at a meeting a second time has seen all others at
// the one between, after they read. All that the PEs do together counts, also barriers and allocations, so
// that they stay in turn when some do something else.
#pragma once
#include <cstdint>
#include <vector>

#include "core/dtype.hpp"
#include "core/error.hpp"
#include "reduce/reduce.hpp"
#include "symm/table.hpp"

namespace unicomm::symm {

// What a PE calls. All say the same, else all get kMismatch, with a claim of each.
struct Call {
    uint32_t op = 0;
    DType dtype = DType::kNone;
    Red red = Red::kNone;
    int root = -1;
    bool relaxed = false;  // no barrier at the end
    uint64_t more = 0;     // anything else that must be the same
    uint64_t deadline_ns = 0;
    Stream stream = nullptr;
};

struct Memory {  // of a tensor
    char* data;
    uint64_t bytes;
};

// Rows of a tensor, or a matrix in steps of elements.
struct Rows {
    char* data;
    int64_t rows;
    uint64_t row_bytes;
};
struct Tile {
    char* data;
    int64_t rows, columns, row_step, column_step;
};

// Why nothing was written, the same on all PEs.
struct Refusal {
    enum Why : int { kNone = 0, kFull = 1, kSplits = 2 } why = kNone;
    int pe = -1;       // kFull: whose output is too small; kSplits: whose splits are beyond its input
    int64_t rows = 0;  // that it would need
};

Fault fault_of(int code, const Error& error);

class Composites {
  public:
    // `said`: symmetric memory of `said_bytes(world)`.
    Composites(const Vtbl& table, Domain domain, int rank, int world, void* said)
        : table_(table), domain_(domain), rank_(rank), world_(world), said_(static_cast<uint64_t*>(said)) {}
    static uint64_t said_bytes(int world) { return 2 * sizeof(uint64_t) * (kHead + uint64_t(world)); }

    // Something that the PEs do together elsewhere.
    void met() { ++meetings_; }
    int rank() const { return rank_; }
    int world() const { return world_; }

    Fault barrier(uint64_t deadline_ns, Stream stream);
    // Returns when all are there.
    Fault meet(const Call& call, const std::vector<Memory>& tensors, const int64_t* each = nullptr);

    Fault broadcast(const Call& call, Memory tensor);
    Fault all_to_all(const Call& call, Memory in, char* out);
    // `splits` [n] need not be symmetric; `came` [n].
    Fault all_to_all_v(const Call& call, Rows in, Rows out, const int64_t* splits, int64_t* came,
                       Refusal& refusal);
    // `splits` [n, experts], `results` [2, experts, n]. Without `align` blocks of experts are dense.
    Fault dispatch(const Call& call, Rows in, Rows out, int64_t* splits, int64_t* results, int experts,
                   int64_t align, Refusal& refusal);
    // `splits` [2, experts, n], `results` [2, n, experts].
    Fault combine(const Call& call, Rows in, Rows out, int64_t* splits, int64_t* results, int experts,
                  Refusal& refusal);

    // `out` need not be symmetric.
    Fault one_shot(const Call& call, Memory in, char* out);
    Fault two_shot(const Call& call, Memory in);
    // `in` has `rows` rows of n parts each.
    Fault reduce_scatter(const Call& call, Memory in, int64_t rows, char* out);
    // Each of `ins` is reduced by its owner. Own ones go into `outs`, in their order, which need not be
    // symmetric.
    Fault reduce_tiles(const Call& call, const std::vector<Tile>& ins, const std::vector<int>& owners,
                       const std::vector<Tile>& outs);

  private:
    static constexpr uint64_t kHead = 8;  // words before those for each PE

    // All PEs' copies of symmetric memory, by PE: where they are, or fetched into `room`.
    Fault copies(const void* at, uint64_t bytes, Stream stream, std::vector<const char*>& out,
                 std::vector<char>& room);
    Fault get(void* to, const void* from, uint64_t bytes, int pe, Stream stream);
    void expect(uint64_t bytes);
    Fault quiet(Stream stream);
    uint64_t* said() { return said_ + (meetings_ % 2) * (kHead + uint64_t(world_)); }
    Fault differ(const std::vector<const char*>& all) const;
    // The end of an operation that came so far.
    Fault leave(const Call& call, const Refusal* refusal = nullptr);
    Fault move(const Call& call, Rows in, Rows out, const std::vector<const char*>& splits, int64_t* results,
               int experts, int64_t align, Refusal& refusal);

    Vtbl table_;
    Domain domain_;
    int rank_, world_;
    uint64_t* said_;
    uint64_t meetings_ = 0;
    // Kept from call to call; operations of a communicator run one at a time.
    std::vector<const char*> splits_, sources_;
    std::vector<char> splits_room_, sources_room_;
    std::vector<int64_t> filled_;
};

}  // namespace unicomm::symm
