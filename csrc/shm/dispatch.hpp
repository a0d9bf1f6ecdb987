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

// An operation by the numbers of `Call`; `timeout`: seconds from now.
Op op_of(uint32_t code, int dtype, int red, int root, uint64_t count, uint64_t extra, double timeout);

// Cuts one tensor into n equal parts.
std::vector<Buffer> equal_parts(const Tensor& t, int n);

// Whether the input or output of an operation is cut into one part per rank.
bool cuts_input(OpCode code);
bool cuts_output(OpCode code);
bool reduces(OpCode code);

// Runs a collective. The caller holds g.running() but not the GIL.
Fault dispatch(Group& g, const Op& op, const std::vector<Buffer>& ins, const std::vector<Buffer>& outs,
               uint64_t elements);

}  // namespace unicomm::shm
