// The recorder of the process as Python uses it: the ring's writer, and the call paths of operations.
#pragma once
#include <cstdint>
#include <string>

#include "operations/tensor.hpp"
#include "recorder/call_path.hpp"
#include "recorder/ring.hpp"

namespace unicomm {

// Returns the next number of an operation, over all communicators of the process, from 0.
uint64_t next_op_id();

class Recorder {
  public:
    Recorder(const std::string& path, const std::string& meta, int rank, int world, uint32_t records)
        : writer(path, meta, rank, world, records), paths(writer) {}
    ~Recorder();
    Recorder(const Recorder&) = delete;
    Recorder& operator=(const Recorder&) = delete;

    // Writes the record with the call path of this thread; returns its id. The GIL must be held.
    uint64_t begin(ring::NewRecord& record) {
        record.frame = paths.current();
        return writer.begin(record);
    }

    void make_current();  // a forked child must not write to the current recorder
    static void detach_after_fork();

    ring::Writer writer;
    CallPaths paths;
};

// Adds a tensor to the inputs or outputs of a record. The first tensor sets dtype and shape.
void describe(const Tensor& t, bool first, uint64_t& numel, uint8_t& dtype, uint8_t& ndim, int64_t* dims);

}  // namespace unicomm
