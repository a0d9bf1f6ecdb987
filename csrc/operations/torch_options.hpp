// torch's AllreduceOptions, read where it lies: its three getters cost more than the operation. Python finds
// out the offsets by experiment (c10d/torch_options.py); until it has, nothing is read.
#pragma once
#include <Python.h>

#include <array>
#include <cstdint>
#include <cstring>

namespace unicomm {

struct AllReduceOptions {
    PyTypeObject* type = nullptr;  // exactly this one; null: unknown
    size_t value = 0;              // in the object: the address of the struct; the rest is in that
    size_t red = 0, timeout = 0, later = 0;
    int64_t no_timeout = 0;
    std::array<uint8_t, 16> reds{};  // ours for torch's number; 0: not for the fast path

    // Whether they ask for no more than a plain synchronous reduction by `code`.
    bool plain(PyObject* options, uint8_t& code) const {
        if (!type || Py_TYPE(options) != type) return false;
        const char* base;
        std::memcpy(&base, reinterpret_cast<const char*>(options) + value, sizeof base);
        int64_t limit;
        std::memcpy(&limit, base + timeout, sizeof limit);
        auto number = static_cast<uint8_t>(base[red]);
        if (base[later] || limit != no_timeout || number >= reds.size()) return false;
        code = reds[number];
        return code != 0;
    }
};

extern AllReduceOptions all_reduce_options;  // set once, before any communicator has its first operation

}  // namespace unicomm
