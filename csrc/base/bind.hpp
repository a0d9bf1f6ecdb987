// What all bindings share: nanobind, the GIL, and the functions that add each part to the module.
#pragma once
#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

#include <cstring>

#include "portable/python.hpp"

namespace nb = nanobind;

namespace unicomm {

// Runs `f`, which takes the GIL. Until Python 3.13, a thread that takes the GIL of a finalized interpreter is
// ended by unwinding its stack, and a destructor on the way (of nb::gil_scoped_release, for example) then
// ends the whole process. Such a thread sleeps here instead, as it does since 3.14.
template <class F>
void with_end_of_python(F f) {
    try {
        f();
    } catch (abi::__forced_unwind&) {
        for (;;) pause();
    }
}

// Releases the GIL for its lifetime.
class GilReleased {
  public:
    GilReleased() : state_(PyEval_SaveThread()) {}
    ~GilReleased() {
        with_end_of_python([this] { PyEval_RestoreThread(state_); });
    }
    GilReleased(const GilReleased&) = delete;
    GilReleased& operator=(const GilReleased&) = delete;

  private:
    PyThreadState* state_;
};

// Reads the unique id of a library.
template <class Id>
Id read_id(const nb::bytes& bytes) {
    Id id;
    if (bytes.size() != sizeof id) throw nb::value_error("a unique id has 128 bytes");
    std::memcpy(&id, bytes.c_str(), sizeof id);
    return id;
}

void bind_operations(nb::module_& m);
void bind_recorder(nb::module_& m);
void bind_dump(nb::module_& m);
void bind_reduce(nb::module_& m);
void bind_checksum(nb::module_& m);
void bind_wire(nb::module_& m);
void bind_shm(nb::module_& m);
void bind_all_reduce_method(nb::module_& m);
void bind_noted_property(nb::module_& m);
void bind_fast(nb::module_& m);
void bind_short_methods(nb::module_& m);
void bind_work(nb::module_& m);
void bind_single_messages(nb::module_& m);
void bind_nccl(nb::module_& m);
void bind_transport(nb::module_& m);
void bind_ucx(nb::module_& m);
void bind_tcp(nb::module_& m);
void bind_hosts(nb::module_& m);
void bind_symm(nb::module_& m);
}  // namespace unicomm
