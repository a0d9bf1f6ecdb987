// Operations composed of a table's functions: broadcast, all-to-all, reductions, and the exchanges of a
// mixture of experts. They are written once for every library that has puts and gets. If a library's memory
// can be addressed, nothing is copied twice.
//
// All of them read: each PE waits until all have arrived, checks what the others have for it, and copies it.
// So a PE writes only to its own memory (except in the second half of two_shot), and a PE that gives up
// corrupts no other.
//
// An operation begins with a meeting: each PE writes an announcement of its call into its own symmetric
// memory, and all PEs compare all announcements. There are two announcements per PE, used in turn: a PE that
// is at a meeting for the second time has seen all others at the meeting between, after they had read.
// Everything that the PEs do together counts as a meeting, also barriers and allocations, so that they stay
// in turn if some of them do something else.
#pragma once
#include <cstdint>
#include <vector>

#include "base/error.hpp"
#include "operations/dtype.hpp"
#include "reduce/fold.hpp"
#include "symm/table.hpp"

namespace unicomm::symm {

// A call. All PEs must pass the same, else all get kMismatch, with a claim of each.
struct Call {
    uint32_t op = 0;
    DType dtype = DType::kNone;
    Red red = Red::kNone;
    int root = -1;
    bool relaxed = false;  // no barrier at the end
    uint64_t more = 0;     // other values that must agree
    uint64_t deadline_ns = 0;
    Stream stream = nullptr;
};

struct Memory {  // a tensor
    char* data;
    uint64_t bytes;
};

// Rows of a tensor; a matrix with steps in elements.
struct Rows {
    char* data;
    int64_t rows;
    uint64_t row_bytes;
};
struct Tile {
    char* data;
    int64_t rows, columns, row_step, column_step;
};

// Why nothing was written; the same on all PEs.
struct Refusal {
    enum Why : int { kNone = 0, kFull = 1, kSplits = 2 } why = kNone;
    int pe = -1;       // kFull: whose output is too small; kSplits: whose splits exceed its input
    int64_t rows = 0;  // rows that its output would need
};

Fault fault_of(int code, const Error& error);

class Composites {
  public:
    // `said`: symmetric memory of `said_bytes(world)`, for announcements.
    Composites(const Vtbl& table, Domain domain, int rank, int world, void* said)
        : table_(table), domain_(domain), rank_(rank), world_(world), said_(static_cast<uint64_t*>(said)) {}
    static uint64_t said_bytes(int world) { return 2 * sizeof(uint64_t) * (kHead + uint64_t(world)); }

    // Counts something that the PEs did together elsewhere.
    void count_meeting() { ++meetings_; }
    int rank() const { return rank_; }
    int world() const { return world_; }

    Fault barrier(uint64_t deadline_ns, Stream stream);
    // Returns when all PEs have arrived.
    Fault meet(const Call& call, const std::vector<Memory>& tensors, const int64_t* each = nullptr);

    Fault broadcast(const Call& call, Memory tensor);
    Fault all_to_all(const Call& call, Memory in, char* out);
    // `splits` [n] need not be symmetric; `came` [n]: the rows received from each PE.
    Fault all_to_all_v(const Call& call, Rows in, Rows out, const int64_t* splits, int64_t* came,
                       Refusal& refusal);
    // `splits` [n, experts], `results` [2, experts, n]. `align` 0: the blocks of the experts are dense.
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
    // Each of `ins` is reduced by its owner. The results of this PE go into `outs`, in order; these need not
    // be symmetric.
    Fault reduce_tiles(const Call& call, const std::vector<Tile>& ins, const std::vector<int>& owners,
                       const std::vector<Tile>& outs);

  private:
    static constexpr uint64_t kHead = 8;  // words before the words for each PE

    // Finds the copies of symmetric memory of all PEs: their addresses, or copies fetched into `room`.
    Fault copies(const void* at, uint64_t bytes, Stream stream, std::vector<const char*>& out,
                 std::vector<char>& room);
    Fault get(void* to, const void* from, uint64_t bytes, int pe, Stream stream);
    void expect(uint64_t bytes);
    Fault quiet(Stream stream);
    uint64_t* said() { return said_ + (meetings_ % 2) * (kHead + uint64_t(world_)); }
    Fault differ(const std::vector<const char*>& all) const;
    // Ends an operation that has succeeded or was refused.
    Fault leave(const Call& call, const Refusal* refusal = nullptr);
    Fault move(const Call& call, Rows in, Rows out, const std::vector<const char*>& splits, int64_t* results,
               int experts, int64_t align, Refusal& refusal);

    Vtbl table_;
    Domain domain_;
    int rank_, world_;
    uint64_t* said_;
    uint64_t meetings_ = 0;
    // Kept between calls; operations of a communicator run one at a time.
    std::vector<const char*> splits_, sources_;
    std::vector<char> splits_room_, sources_room_;
    std::vector<int64_t> filled_;
};

}  // namespace unicomm::symm
