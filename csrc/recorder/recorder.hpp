// The process's recorder as Python code uses it: the ring's writer, and the caller's file and line.
#pragma once
#include <Python.h>

#include <cstdint>
#include <string>
#include <unordered_map>

#include "core/tensor.hpp"
#include "recorder/ring.hpp"

namespace unicomm {

// Numbers the operations of all communicators of the process, from 0.
uint64_t next_op_id();

class Recorder {
  public:
    Recorder(const std::string& path, const std::string& meta, int rank, int world, uint32_t records)
        : writer(path, meta, rank, world, records) {}
    ~Recorder();
    Recorder(const Recorder&) = delete;
    Recorder& operator=(const Recorder&) = delete;

    // The user's innermost frame, interned once per call site; torch's where there is none (threads of
    // autograd). The GIL must be held.
    uint32_t caller_frame();

    // Frames of files below these folders are the package's own, or torch's, and not the user's.
    static void set_folders(const std::string& own, const std::string& library);
    void make_current();  // the one that a forked child must leave alone
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

    // Both are guarded by the GIL.
    std::unordered_map<PyCodeObject*, Whose> whose_;
    std::unordered_map<CallSite, uint32_t, CallSiteHash> sites_;
};

// Adds a tensor to one side of a record; the first one gives dtype and shape.
void describe(const Tensor& t, bool first, uint64_t& numel, uint8_t& dtype, uint8_t& ndim, int64_t* dims);

}  // namespace unicomm
