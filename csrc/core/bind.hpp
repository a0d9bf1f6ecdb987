#pragma once
#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

namespace nb = nanobind;

namespace unicomm {

// Until 3.13, Python ends a thread that wants its lock when the interpreter has been finalized, by unwinding
// its stack, which ends the whole process where a destructor is on the way (of nb::gil_scoped_release, or the
// like). So such a thread stops here instead, as it does since 3.14.
template <class F>
void with_end_of_python(F f) {
    try {
        f();
    } catch (abi::__forced_unwind&) {
        for (;;) pause();
    }
}

// Python's lock is released as long as it lives.
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

void bind_recorder(nb::module_& m);
void bind_dump(nb::module_& m);
void bind_reduce(nb::module_& m);
void bind_shm(nb::module_& m);
void bind_fast(nb::module_& m);
void bind_nccl(nb::module_& m);
void bind_symm(nb::module_& m);
void bind_torch_options(nb::module_& m);
}  // namespace unicomm
