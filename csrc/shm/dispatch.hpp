// Selects the Group's method for an operation code, and the buffers of its tensors.
#pragma once
#include <vector>

#include "base/clock.hpp"
#include "operations/opcode.hpp"
#include "operations/tensor.hpp"
#include "shm/group.hpp"

namespace unicomm::shm {

inline Buffer buffer_of(const Tensor& t) {
    return {static_cast<char*>(t.data), static_cast<uint64_t>(t.bytes)};
}

// Cuts one tensor into n equal parts.
std::vector<Buffer> equal_parts(const Tensor& t, int n);

// Whether the input or output of an operation is cut into one part per rank.
bool cuts_input(OpCode code);
bool cuts_output(OpCode code);

// Runs a collective. The caller holds g.running() but not the GIL.
Fault dispatch(Group& g, const Op& op, const std::vector<Buffer>& ins, const std::vector<Buffer>& outs,
               uint64_t elements);

}  // namespace unicomm::shm
