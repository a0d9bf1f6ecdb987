// The recorder that a fork detaches, numbers of operations, and tensors in records.
#include "recorder/recorder.hpp"

#include <atomic>

namespace unicomm {
namespace {

Recorder* current = nullptr;
std::atomic<uint64_t> op_ids{0};

}  // namespace

uint64_t next_op_id() { return op_ids.fetch_add(1); }

Recorder::~Recorder() {
    if (current == this) current = nullptr;
}

void Recorder::make_current() { current = this; }

void Recorder::detach_after_fork() {
    if (current) current->writer.detach_after_fork();
}

void describe(const Tensor& t, bool first, uint64_t& numel, uint8_t& dtype, uint8_t& ndim, int64_t* dims) {
    numel += static_cast<uint64_t>(t.numel);
    if (!first) return;
    dtype = static_cast<uint8_t>(t.dtype);
    ndim = static_cast<uint8_t>(t.ndim < 255 ? t.ndim : 255);
    for (int d = 0; d < t.ndim && d < ring::kMaxDims; ++d) dims[d] = t.shape[d];
}

}  // namespace unicomm
