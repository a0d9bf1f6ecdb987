// Groups, and how operations get into streams.
#pragma once
#include <functional>
#include <memory>
#include <tuple>
#include <vector>

#include "comm.hpp"
#include "streams.hpp"

namespace mock_nccl {

// An operation of one rank, which goes on step by step beside those of the same group.
struct Operation {
    CommPtr comm;
    Signature signature;
    bool done = false;
    // Operations of one queue run one after the other: kind, peer, direction.
    std::tuple<int, int, bool> queue;

    Operation(CommPtr c, const char* function, int dtype, int op, int root, uint64_t count);
    virtual ~Operation() = default;
    virtual bool step() = 0;  // true when something moved
    // The same once more, for a graph; asked before it has begun. Null where that cannot be.
    virtual std::unique_ptr<Operation> again() const { return nullptr; }
    bool step_transfers(std::vector<Transfer>& transfers, bool* all_done);
};

// Puts an operation into its stream, or into the open group. Logs the call.
Result submit(Call& call, std::unique_ptr<Operation> operation);

// Runs the work that makes or ends communicators: at once, at the end of the open group, or (not blocking) in
// a thread while the state of `comm` says "in progress". Logs the call. `says_so`: whether the call returns
// "in progress" then; calls that derive something from a communicator return success.
Result perform(Call& call, const CommPtr& comm, bool blocking, std::function<Result()> work,
               bool says_so = true);

// The error of a call inside of a group is that of the group.
Result failed(Result code);

}  // namespace mock_nccl
