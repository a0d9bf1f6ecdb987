// From an operation's number and its tensors to the Group's method.
#pragma once
#include <vector>

#include "core/opcode.hpp"
#include "core/tensor.hpp"
#include "shm/group.hpp"

namespace unicomm::shm {

inline Piece piece_of(const Tensor& t) {
    return {static_cast<char*>(t.data), static_cast<uint64_t>(t.bytes)};
}

// One tensor as n equal parts.
std::vector<Piece> equal_parts(const Tensor& t, int n);

// Which side of an operation is cut into one part for each rank.
bool cuts_input(OpCode code);
bool cuts_output(OpCode code);

// Runs a collective; the caller holds g.running(), and not the GIL.
Fault dispatch(Group& g, const Op& op, const std::vector<Piece>& ins, const std::vector<Piece>& outs,
               uint64_t elements);

uint64_t deadline_after(double seconds);

}  // namespace unicomm::shm
