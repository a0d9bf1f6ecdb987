// The recorder of the process as Python uses it: the ring's writer, and the file and line of the caller.
#pragma once
#include <Python.h>

#include <cstdint>
#include <string>
#include <unordered_map>

#include "operations/tensor.hpp"
#include "recorder/ring.hpp"

namespace unicomm {

// Returns the next number of an operation, over all communicators of the process, from 0.
uint64_t next_op_id();

class Recorder {
  public:
    Recorder(const std::string& path, const std::string& meta, int rank, int world, uint32_t records)
        : writer(path, meta, rank, world, records) {}
    ~Recorder();
    Recorder(const Recorder&) = delete;
    Recorder& operator=(const Recorder&) = delete;

    // Returns the innermost frame of the user's code, interned once per call site. Without one (threads of
    // autograd) returns torch's. The GIL must be held.
    uint32_t caller_frame();

    // Files below `own` belong to this package and files below `library` to torch; all others are the user's.
    static void set_folders(const std::string& own, const std::string& library);
    void make_current();  // a forked child must not write to the current recorder
    static void detach_after_fork();

    ring::Writer writer;

  private:
    struct CallSite {
        PyCodeObject* code;
        int lasti;
        bool operator==(const CallSite&) const = default;
    };
    struct CallSiteHash {
        size_t operator()(const CallSite& s) const {
            return std::hash<void*>()(s.code) * 31 + static_cast<size_t>(s.lasti);
        }
    };
    enum class Whose : uint8_t { kUser, kOwn, kLibrary };
    Whose whose_is(PyCodeObject* code);
    uint32_t site(PyCodeObject* code, PyFrameObject* frame);

    // The GIL guards both.
    std::unordered_map<PyCodeObject*, Whose> whose_;
    std::unordered_map<CallSite, uint32_t, CallSiteHash> sites_;
};

// Adds a tensor to the inputs or outputs of a record. The first tensor sets dtype and shape.
void describe(const Tensor& t, bool first, uint64_t& numel, uint8_t& dtype, uint8_t& ndim, int64_t* dims);

}  // namespace unicomm
