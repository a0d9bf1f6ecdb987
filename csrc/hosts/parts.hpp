// What operations on several hosts are made of.
#pragma once
#include "operations/dtype.hpp"
#include "operations/opcode.hpp"
#include "operations/reduction.hpp"
#include "shm/dispatch.hpp"

namespace unicomm::hosts {

// Whether those who fold take the values of all ranks at once. That rounds narrow floats once; where they are
// too many for a slot, the general path carries them in float32.
inline bool folds_all_ranks(OpCode code, DType t, Red red) {
    const bool narrow =
        t == DType::kFloat16 || t == DType::kBFloat16 || t == DType::kFloat8E4M3 || t == DType::kFloat8E5M2;
    return shm::reduces(code) && narrow && (red == Red::kSum || red == Red::kProduct || red == Red::kAvg);
}

// What a column carries for a reduction, so that it is rounded once.
enum class Carried {
    kPartial,   // its host's partial result
    kAllRanks,  // the values of all ranks of its host
    kWide,      // the partial result in float32
};

// A collective of a part of the ranks, of bytes.
inline shm::Op part_of(OpCode code, uint64_t deadline, int root = -1) {
    shm::Op op;
    op.code = static_cast<uint32_t>(code);
    op.root = root;
    op.deadline_ns = deadline;
    if (code != OpCode::kBarrier) op.dtype = DType::kUInt8;
    return op;
}

}  // namespace unicomm::hosts
