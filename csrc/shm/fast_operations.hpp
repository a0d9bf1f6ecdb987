// What runs the operations of a fast path: the memory of a host, or a network.
#pragma once
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/error.hpp"
#include "operations/tensor.hpp"

namespace unicomm {

namespace ring {
class Writer;
}
namespace shm {
struct Op;
struct Message;
}  // namespace shm

// An operation begins and ends with `running` held. `begins` is called with the GIL, `collective` and
// `exchange` with or without it.
class FastOperations {
  public:
    virtual ~FastOperations() = default;
    virtual int rank() const = 0;
    virtual int world() const = 0;
    virtual std::mutex& running() = 0;  // held while an operation runs

    // Returns whether it takes the operation; if it does, the operation runs next. If not, the general path
    // runs it.
    virtual bool begins(const shm::Op&, const Tensor&) { return true; }
    virtual bool begins(const std::vector<shm::Message>&) { return true; }
    // Run an operation to its end. A barrier has tensors without memory.
    virtual Fault collective(const shm::Op& op, const Tensor& in, const Tensor& out) = 0;
    virtual Fault exchange(const std::vector<shm::Message>& messages, uint64_t deadline_ns) = 0;

    // Whether it calls `Deferred::announced` and `Deferred::waits`.
    virtual bool announces() const { return false; }

    // Called with the GIL when a signal handler has raised in an operation, whose fault it became.
    virtual void interrupted() {}
    virtual void abort() = 0;  // by any thread
    virtual void wake_me() {}  // has a wait of this rank look again; by any thread
    // Where records go of what it finds out, such as deadlocks; null: nowhere any more.
    virtual void recorded_in(ring::Writer*, uint16_t) {}
};

}  // namespace unicomm
